"""Several small dense values in one frame, one behind the other, each at a multiple of 4 bytes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

import fastdist._core as _core
from fastdist.ps.wire.frames import Array, floats_in

# Of up to so many elements values travel together: a message costs as much as 64 KiB of it.
SMALL_SIZE = 1 << 14
# What PUSH_MANY says of each object. Of PULL_MANY's replies, the steps come before the values.
PUSHED = np.dtype([("object", "<u8"), ("step", "<u8"), ("lr", "<f4")])
STEP_BYTES = 8

Kinds = Sequence[tuple[Sequence[int], _core.WireFormat | None]]  # shapes, and how they travel


def values_in(frame: memoryview, kinds: Kinds) -> Iterator[Array]:
    """The values of a frame, as float32.

    Raises:
        ValueError: its size is another.
    """
    extents, size = _extents(kinds)
    if frame.nbytes != size:
        raise ValueError(f"expected {len(kinds)} values of {size} bytes, got {frame.nbytes}")
    return (
        floats_in(frame[extent], shape, wire)
        for extent, (shape, wire) in zip(extents, kinds, strict=True)
    )


def joined(values: Iterable[Array], kinds: Kinds) -> Array:
    """A frame of values, contiguous float32."""
    extents, size = _extents(kinds)
    frame = np.zeros(size, np.uint8)
    for value, extent, (_, wire) in zip(values, extents, kinds, strict=True):
        if wire is None:
            frame[extent].view(np.float32)[...] = value.reshape(-1)
        else:
            wire.encode(value, frame[extent])
    return frame


def _extents(kinds: Kinds) -> tuple[list[slice], int]:
    """The bytes of each value, and of all."""
    extents, begin = [], 0
    for shape, wire in kinds:
        size = math.prod(shape)
        nbytes = 4 * size if wire is None else wire.nbytes(size)
        extents.append(slice(begin, begin + nbytes))
        begin += -(-nbytes // 4) * 4
    return extents, begin
