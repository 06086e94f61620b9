"""Arrays as frames of messages: contiguous, little-endian."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

import fastdist._core as _core

Array = np.ndarray[Any, Any]


def ids_in(frame: memoryview) -> Array:
    """The ids that a frame holds.

    Raises:
        ValueError: its size is none of ids.
    """
    if frame.nbytes % 8:
        raise ValueError(f"ids of {frame.nbytes} bytes, not a multiple of 8")
    return _aligned(np.frombuffer(frame, np.uint64))


def floats_in(
    frame: memoryview, shape: Sequence[int], wire: _core.WireFormat | None = None
) -> Array:
    """The values of a known shape that a frame holds, as float32.

    Args:
        frame: of a message.
        shape: of the values.
        wire: how they are encoded; None for float32.

    Raises:
        ValueError: its size is another.
    """
    if wire is not None:
        values = np.empty(shape, np.float32)
        fill(values, frame, wire)
        return values
    if frame.nbytes != 4 * math.prod(shape):
        raise ValueError(f"expected float32 of shape {tuple(shape)}, got {frame.nbytes} bytes")
    return _aligned(np.frombuffer(frame, np.float32)).reshape(shape)


def fill(out: Array, frame: memoryview, wire: _core.WireFormat | None = None) -> None:
    """Copy the values that a frame holds.

    Args:
        out: contiguous float32.
        frame: as many.
        wire: how they are encoded; None for float32.

    Raises:
        ValueError: its size is another.
    """
    if wire is not None:
        wire.decode(np.frombuffer(frame, np.uint8), out)
        return
    if frame.nbytes != out.nbytes:
        raise ValueError(f"expected float32 of shape {out.shape}, got {frame.nbytes} bytes")
    out.reshape(-1).view(np.uint8)[...] = np.frombuffer(frame, np.uint8)


def encoded(values: Array, wire: _core.WireFormat | None) -> Array:
    """Values to send: contiguous float32, or what encodes them."""
    if wire is None:
        return values
    message = np.empty(wire.nbytes(values.size), np.uint8)
    wire.encode(values, message)
    return message


def keep_freed_memory() -> None:
    """Have malloc use the memory of frames again, instead of returning it to the kernel.

    What comes fresh from the kernel costs a page fault for each 4 KiB, more than receiving them.
    glibc keeps blocks of up to the largest size that was freed before, but no more than 32 MiB
    (mallopt(3), M_MMAP_THRESHOLD); other libraries keep memory anyway.
    """
    np.empty(31 << 20, np.uint8)


def _aligned(array: Array) -> Array:
    """Small frames lie anywhere in what was received at once."""
    return array if array.flags.aligned else array.copy()


def ids_frame(ids: Any) -> Array:
    """Ids to send, of 64 bits.

    Raises:
        TypeError: they are no integers.
    """
    array = np.ascontiguousarray(ids)
    if array.dtype.kind not in "iu":
        raise TypeError(f"ids must be integers, got {array.dtype}")
    return array if array.dtype.itemsize == 8 else array.astype(np.int64)


def floats_frame(values: Any) -> Array:
    """Values to send, as float32."""
    return np.ascontiguousarray(values, np.float32)
