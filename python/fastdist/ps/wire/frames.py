"""Arrays as frames of messages: contiguous, little-endian."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

import fastdist._core as _core

Array = np.ndarray[Any, Any]


def to_ids(ids: Any) -> Array:
    """Convert ids to contiguous 64-bit integers, ready to send.

    Raises:
        TypeError: the ids are not integers.
    """
    array = np.ascontiguousarray(ids)
    if array.dtype.kind not in "iu":
        raise TypeError(f"ids must be integers, got {array.dtype}")
    return array if array.dtype.itemsize == 8 else array.astype(np.int64)


def to_floats(values: Any) -> Array:
    """Convert values to contiguous float32, ready to send."""
    return np.ascontiguousarray(values, np.float32)


def decode_ids(frame: memoryview) -> Array:
    """Return the ids in a frame.

    Raises:
        ValueError: the frame's size is not a multiple of 8 bytes.
    """
    if frame.nbytes % 8:
        raise ValueError(f"ids of {frame.nbytes} bytes, not a multiple of 8")
    return np.frombuffer(frame, np.uint64)


def decode_floats(
    frame: memoryview, shape: Sequence[int], wire: _core.WireFormat | None = None
) -> Array:
    """Return the values in a frame, as float32.

    Args:
        frame: a frame of a message.
        shape: the values' shape.
        wire: the encoding; None for float32.

    Raises:
        ValueError: the frame has another size than these values take.
    """
    if wire is not None:
        values = np.empty(shape, np.float32)
        decode_floats_into(values, frame, wire)
        return values
    if frame.nbytes != 4 * math.prod(shape):
        raise ValueError(f"expected float32 of shape {tuple(shape)}, got {frame.nbytes} bytes")
    return np.frombuffer(frame, np.float32).reshape(shape)


def decode_floats_into(out: Array, frame: memoryview, wire: _core.WireFormat | None = None) -> None:
    """Copy the values in a frame to an array.

    Args:
        out: contiguous float32.
        frame: a frame of a message, with as many values as `out`.
        wire: the encoding; None for float32.

    Raises:
        ValueError: the frame has another size than these values take.
    """
    if wire is not None:
        wire.decode(np.frombuffer(frame, np.uint8), out)
        return
    if frame.nbytes != out.nbytes:
        raise ValueError(f"expected float32 of shape {out.shape}, got {frame.nbytes} bytes")
    out.reshape(-1).view(np.uint8)[...] = np.frombuffer(frame, np.uint8)


def keep_freed_memory() -> None:
    """Make malloc reuse the memory of freed frames instead of returning it to the kernel.

    Fresh memory costs a page fault for each 4 KiB, which takes longer than receiving 4 KiB. glibc
    keeps blocks of up to the largest size that has been freed before, at most 32 MiB (mallopt(3),
    M_MMAP_THRESHOLD); other C libraries keep freed memory anyway.
    """
    np.empty(31 << 20, np.uint8)
