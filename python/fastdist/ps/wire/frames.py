"""Arrays as frames of messages: contiguous, little-endian."""

from __future__ import annotations

from typing import Any

import numpy as np

import fastdist._core as _core

Array = np.ndarray[Any, Any]


def to_ids(ids: Any) -> Array:
    """Convert ids to contiguous 64-bit integers; raise TypeError if they are not integers."""
    array = np.ascontiguousarray(ids)
    if array.dtype.kind not in "iu":
        raise TypeError(f"ids must be integers, got {array.dtype}")
    return array if array.dtype.itemsize == 8 else array.astype(np.int64)


def to_floats(values: Any) -> Array:
    """Convert values to contiguous float32."""
    return np.ascontiguousarray(values, np.float32)


def decode_floats_into(out: Array, frame: memoryview, wire: _core.WireFormat | None) -> None:
    """Copy the values in a frame of their size to contiguous float32; no wire means float32."""
    data = np.frombuffer(frame, np.uint8)
    if wire is None:
        out.reshape(-1).view(np.uint8)[...] = data
    else:
        wire.decode(data, out)


def keep_freed_memory() -> None:
    """Make malloc reuse the memory of freed frames instead of returning it to the kernel.

    Fresh memory costs a page fault for each 4 KiB, which takes longer than receiving 4 KiB. glibc
    keeps blocks of up to the largest size that has been freed before, at most 32 MiB (mallopt(3),
    M_MMAP_THRESHOLD); other C libraries keep freed memory anyway.
    """
    np.empty(31 << 20, np.uint8)
