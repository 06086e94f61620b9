"""On which GPU an array lies, and the stream on which it is ready: torch's, cupy's, others'.

Others are those with DLPack or the CUDA array interface, whose version 3 names a stream.
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
    """The number of the GPU that an array, or the first of a list, lies on; None: it is on none.

    `SOME_GPU` where it is empty and its library does not tell.
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
    return _device_of_interface(arrays)


def _device_of_interface(array: Any) -> int | None:
    interface = getattr(array, "__cuda_array_interface__", None)
    if interface is None:
        return None
    address = interface["data"][0]
    return _core.cuda_device_of(address) if address else SOME_GPU


def current_stream(arrays: Any, device: int) -> int:
    """The handle of the stream on which the arrays' library works."""
    array = arrays[0] if isinstance(arrays, (list, tuple)) else arrays
    if hasattr(array, "is_cuda"):
        return int(sys.modules["torch"].cuda.current_stream(device).cuda_stream)
    if type(array).__module__.partition(".")[0] == "cupy":
        return int(sys.modules["cupy"].cuda.get_current_stream(device).ptr)
    interface = getattr(array, "__cuda_array_interface__", {})
    return interface.get("stream") or _LEGACY_STREAM


def stream_handle(stream: Any, device: int) -> int:
    """The handle of a stream of torch, cupy, numba or cuda.core, or an integer that is one.

    Raises:
        ValueError: a stream of another GPU.
        TypeError: no stream.
    """
    own = getattr(getattr(stream, "device", None), "index", None)  # torch's know their device
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
