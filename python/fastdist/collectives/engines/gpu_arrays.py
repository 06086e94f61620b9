"""The GPU of an array and the stream on which it is ready, for torch, cupy and other libraries.

Other libraries are supported by DLPack or by the CUDA array interface, whose version 3 names a
stream.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

import fastdist._core as _core

_DLPACK_CUDA = 2
_LEGACY_STREAM = 0
SOME_GPU = -1


def device_of(arrays: Any) -> int | None:
    """Return the number of the GPU of an array, or of the first array of a list.

    Returns:
        The number; None if the array is not on a GPU; `SOME_GPU` if the array is empty and its
        library does not tell the device.
    """
    if isinstance(arrays, np.ndarray):
        return None
    if isinstance(arrays, (list, tuple)):
        if not arrays:
            return None
        found = (device_of(array) for array in arrays)
        return next((device for device in found if device != SOME_GPU), SOME_GPU)
    is_cuda = getattr(arrays, "is_cuda", None)
    if is_cuda is not None:  # torch
        return arrays.get_device() if is_cuda else None
    place = getattr(arrays, "__dlpack_device__", None)
    if place is not None:
        kind, number = place()
        return int(number) if kind == _DLPACK_CUDA else None
    interface = getattr(arrays, "__cuda_array_interface__", None)
    if interface is None:
        return None
    address = interface["data"][0]
    return _core.cuda_device_of(address) if address else SOME_GPU


def current_stream(arrays: Any, device: int) -> int:
    """Return the handle of the current stream of the arrays' library."""
    known = _core.current_stream(arrays, device)
    if known is not None:
        return known
    array = arrays[0] if isinstance(arrays, (list, tuple)) else arrays
    if hasattr(array, "is_cuda"):
        return int(sys.modules["torch"].cuda.current_stream(device).cuda_stream)
    if type(array).__module__.partition(".")[0] == "cupy":
        return int(sys.modules["cupy"].cuda.get_current_stream(device).ptr)
    interface = getattr(array, "__cuda_array_interface__", {})
    return interface.get("stream") or _LEGACY_STREAM


def stream_handle(stream: Any, device: int) -> int:
    """Return the handle of a stream of torch, cupy, numba or cuda.core; integers are handles."""
    own = getattr(getattr(stream, "device", None), "index", None)  # torch's streams
    if own is not None and own != device:
        raise ValueError(f"stream must be of the arrays' GPU, cuda:{device}, got cuda:{own}")
    for name in ("cuda_stream", "ptr"):  # torch, cupy
        handle = getattr(stream, name, None)
        if handle is not None:
            return int(handle)
    if hasattr(stream, "__cuda_stream__"):  # numba, cuda.core
        return int(stream.__cuda_stream__()[1])
    if isinstance(stream, int) and stream >= 0:
        return stream
    raise TypeError(
        f"stream must be a stream of torch, cupy or another library, or its handle; got {stream!r}"
    )
