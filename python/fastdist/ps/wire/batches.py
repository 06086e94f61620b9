"""Division of values into messages: small values and rows share one, large values need several.

Values of one message share a frame, one after the other, each at a multiple of 4 bytes.

A dense value of more than `PART_SIZE` elements travels in ranges of that many elements, the last
with what is left: memory for a range is reused, while memory for the whole would be fresh.
"""

from __future__ import annotations

import itertools
import math
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

import fastdist._core as _core

Array = np.ndarray[Any, Any]

# Dense values of up to this many elements share messages, which cost as much as sending 64 KiB.
SMALL_SIZE = 1 << 14
PART_SIZE = 1 << 19
# The frame that names what a message is about: the number of entries, the entries, all ids.
_COUNT = struct.Struct("<Q")
_ENTRY = struct.Struct("<QQfIQ")
IDS = 2**64 - 1

Place = Array | int  # ids in a table, or the first element of a range of a dense variable
Kinds = Sequence[tuple[Sequence[int], _core.WireFormat | None]]  # shapes and wire formats


def to_ids(ids: Any) -> Array:
    """Convert ids to contiguous 64-bit integers; raise TypeError if they are not integers."""
    array = np.ascontiguousarray(ids)
    if array.dtype.kind not in "iu":
        raise TypeError(f"ids must be integers, got {array.dtype}")
    return array if array.dtype.itemsize == 8 else array.astype(np.int64)


def to_floats(values: Any) -> Array:
    """Convert values to contiguous float32."""
    return np.ascontiguousarray(values, np.float32)


class Entry(NamedTuple):
    """The rows of a table, or the range of a dense variable, that a message reads or changes.

    Attributes:
        object: the object's number.
        step: the step of the value that a CHANGE's gradient was computed from.
        lr: the learning rate of a CHANGE; NaN: the update rule's own.
        size: the number of the message's ids that are its own, or of the elements of the range.
        begin: the first element of the range; `IDS` for a table.
    """

    object: int
    step: int
    lr: float
    size: int
    begin: int = IDS


def pack_names(entries: Sequence[Entry], ids: Sequence[memoryview]) -> bytes:
    """Return the frame that names what a message is about; ids are 64-bit integers."""
    return b"".join((_COUNT.pack(len(entries)), *(_ENTRY.pack(*e) for e in entries), *ids))


def unpack_names(frame: memoryview) -> tuple[list[Entry], list[Place]]:
    """Return the entries of such a frame, and the places; raise ValueError if its size is wrong."""
    count = _COUNT.unpack_from(frame)[0] if frame.nbytes >= _COUNT.size else 0
    end = _COUNT.size + count * _ENTRY.size
    if frame.nbytes < end:
        raise ValueError(f"{frame.nbytes} bytes for {count} entries of {_ENTRY.size} bytes")
    entries = [Entry(*entry) for entry in _ENTRY.iter_unpack(frame[_COUNT.size : end])]
    counts = [entry.size if entry.begin == IDS else 0 for entry in entries]
    if frame.nbytes != end + 8 * sum(counts):
        raise ValueError(f"{frame.nbytes - end} bytes of ids, the entries name {sum(counts)} ids")
    ids = np.frombuffer(frame[end:], np.uint64)
    places: list[Place] = [
        ids[used - count : used] if entry.begin == IDS else entry.begin
        for entry, count, used in zip(entries, counts, itertools.accumulate(counts), strict=True)
    ]
    return entries, places


def unpack_values(frame: memoryview, kinds: Kinds) -> list[Array]:
    """Return the values of a frame as float32; those that are not encoded are its own memory.

    Raises ValueError if the frame has another size than these values take.
    """
    extents, size = extents_of(kinds)
    if frame.nbytes != size:
        shapes = ", ".join(str(tuple(shape)) for shape, _ in kinds[:4])
        raise ValueError(
            f"expected values of shape {shapes}, got {frame.nbytes} bytes instead of {size}"
        )
    values: list[Array] = []
    for extent, (shape, wire) in zip(extents, kinds, strict=True):
        if wire is None:
            values.append(np.frombuffer(frame[extent], np.float32).reshape(shape))
        else:
            values.append(np.empty(shape, np.float32))
            wire.decode(np.frombuffer(frame[extent], np.uint8), values[-1])
    return values


def extents_of(kinds: Kinds) -> tuple[list[slice], int]:
    """Return the bytes of each value in a frame, and the size of the frame."""
    extents, begin = [], 0
    for shape, wire in kinds:
        size = math.prod(shape)
        nbytes = 4 * size if wire is None else wire.nbytes(size)
        extents.append(slice(begin, begin + nbytes))
        begin = padded(begin + nbytes)
    return extents, begin


def padded(nbytes: int) -> int:
    """Return where the next value in a frame begins."""
    return -(-nbytes // 4) * 4
