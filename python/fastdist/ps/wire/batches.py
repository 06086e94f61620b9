"""Division of values into messages: small values and rows share one, large values need several.

Values of one message share a frame, one after the other, each at a multiple of 4 bytes.

A value of more than `PART_SIZE` elements travels as parts 1, 2, … of that many elements, the last
part with what is left: memory for a part is reused, while memory for the whole would be fresh. A
value of up to `PART_SIZE` elements is one message, called part 0.
"""

from __future__ import annotations

import math
import struct
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

import fastdist._core as _core
from fastdist.ps.wire.frames import Array, decode_floats, decode_ids

# Dense values of up to this many elements share messages, which cost as much as sending 64 KiB.
SMALL_SIZE = 1 << 14
# The frame that names what a READ or CHANGE is about: the number of entries, the entries, all ids.
_COUNT = struct.Struct("<Q")
_ENTRY = struct.Struct("<QQfI")

PART_SIZE = 1 << 19
_MAX_PARTIAL = 4096

Kinds = Sequence[tuple[Sequence[int], _core.WireFormat | None]]  # shapes and wire formats


class Entry(NamedTuple):
    """The description of an object in a READ or CHANGE.

    Attributes:
        object: its number.
        step: of a CHANGE: the step of the value that the gradient was computed from.
        lr: of a CHANGE: the learning rate; NaN: the update rule's own.
        ids: how many of the message's ids are its own; 0 for a dense variable.
    """

    object: int
    step: int
    lr: float
    ids: int


def pack_names(entries: Sequence[Entry], ids: Sequence[memoryview]) -> bytes:
    """Return the frame that names what a READ or CHANGE is about; ids are 64-bit integers."""
    return b"".join((_COUNT.pack(len(entries)), *(_ENTRY.pack(*e) for e in entries), *ids))


def unpack_names(frame: memoryview) -> tuple[list[Entry], list[Array]]:
    """Return the entries of such a frame, and the ids of each.

    Raises:
        ValueError: the frame has another size than its entries say.
    """
    count = _COUNT.unpack_from(frame)[0] if frame.nbytes >= _COUNT.size else 0
    end = _COUNT.size + count * _ENTRY.size
    if frame.nbytes < end:
        raise ValueError(f"{frame.nbytes} bytes for {count} entries of {_ENTRY.size} bytes")
    entries = [Entry(*entry) for entry in _ENTRY.iter_unpack(frame[_COUNT.size : end])]
    all_ids = decode_ids(frame[end:])
    ids, begin = [], 0
    for entry in entries:
        ids.append(all_ids[begin : begin + entry.ids])
        begin += entry.ids
    if all_ids.size != begin:
        raise ValueError(f"{all_ids.size} ids, the entries name {begin}")
    return entries, ids


def pack_steps(steps: Sequence[int]) -> bytes:
    """Return the beginning of the reply to a READ: the step of each object."""
    return struct.pack(f"<{len(steps)}Q", *steps)


def split_steps(reply: memoryview, count: int) -> tuple[tuple[int, ...], memoryview]:
    """Return the steps in the reply to a READ, and the rest.

    Raises:
        ValueError: the reply is shorter.
    """
    if reply.nbytes < 8 * count:
        raise ValueError(f"expected {count} steps, got {reply.nbytes} bytes")
    return struct.unpack_from(f"<{count}Q", reply), reply[8 * count :]


def pack_values(values: Sequence[Array], kinds: Kinds) -> Array:
    """Return one frame of several values, contiguous float32; a single one is not copied."""
    if len(values) == 1 and kinds[0][1] is None:
        return values[0]
    extents, size = extents_of(kinds)
    frame = np.zeros(size, np.uint8)
    for value, extent, (_, wire) in zip(values, extents, kinds, strict=True):
        if wire is None:
            frame[extent].view(np.float32)[...] = value.reshape(-1)
        else:
            wire.encode(value, frame[extent])
    return frame


def unpack_values(frame: memoryview, kinds: Kinds) -> Iterator[Array]:
    """Return the values of a frame that `pack_values` made, as float32.

    Raises:
        ValueError: the frame has another size than these values take.
    """
    extents, size = extents_of(kinds)
    if frame.nbytes != size:
        shapes = ", ".join(str(tuple(shape)) for shape, _ in kinds[:4])
        raise ValueError(
            f"expected values of shape {shapes}, got {frame.nbytes} bytes instead of {size}"
        )
    return (
        decode_floats(frame[extent], shape, wire)
        for extent, (shape, wire) in zip(extents, kinds, strict=True)
    )


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


def part_numbers(size: int) -> range:
    """Return the numbers of the parts of a value with `size` elements."""
    return range(1) if size <= PART_SIZE else range(1, -(-size // PART_SIZE) + 1)


def part_slice(part: int, size: int) -> slice:
    """Return the elements of a part; part 0 has all of them, whatever the size.

    Raises:
        ValueError: the part is beyond the value.
    """
    begin = max(0, part - 1) * PART_SIZE
    if part and begin >= size:
        raise ValueError(f"part {part} of a variable of {size} elements")
    return slice(begin, min(size, begin + PART_SIZE) if part else size)


def part_slices(size: int) -> Iterator[slice]:
    """Return the elements of every part, in order."""
    return (part_slice(part, size) for part in part_numbers(size))


@dataclass(slots=True)
class _PartialPush:
    step: int
    missing_parts: int


class PartialPushes:
    """Pushes of which only some parts have arrived. Thread-safe.

    The oldest are forgotten over a limit, so that pushes which never complete use no memory; the
    parts that arrived stay applied.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pushes: OrderedDict[tuple[bytes, int], _PartialPush] = OrderedDict()

    def step_of(
        self, push: tuple[bytes, int], parts: int, begin: Callable[[], int]
    ) -> tuple[int, bool]:
        """Return the step that a part belongs to, before the part is applied.

        Args:
            push: the client, and the number of the request before the first part's.
            parts: how many parts the push has.
            begin: called for the part that arrives first; returns the new step.

        Returns:
            The step of the push, and True if this part arrived first.
        """
        with self._lock:
            known = self._pushes.get(push)
            is_first = known is None
            if known is None:
                known = self._pushes[push] = _PartialPush(begin(), parts)
                while len(self._pushes) > _MAX_PARTIAL:
                    self._pushes.popitem(last=False)
            known.missing_parts -= 1
            if known.missing_parts == 0:
                self._pushes.pop(push, None)
            return known.step, is_first
