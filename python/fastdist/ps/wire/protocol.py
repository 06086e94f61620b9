"""The messages between clients and servers; docs/ps_protocol.md describes them for people.

Small values and rows share a message: their values are one frame, one after the other, each at a
multiple of 4 bytes. A dense value of more than `PART_SIZE` elements travels in ranges of that many
elements, the last with what is left: memory for a range is reused, while memory for the whole would
be fresh.
"""

from __future__ import annotations

import enum
import itertools
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

import fastdist._core as _core
from fastdist.errors import FastdistError, UnavailableError

VERSION = 11
MAX_JSON_BYTES = 4 << 20
MAX_FRAME_BYTES = 2**31 - 1
_MAGIC = b"FDPS"
# Magic, version, kind, object, place, number, floor, client: these stay the same in all versions,
# so that each version can answer every other with an error. Then round, incarnation.
_COMMON_HEADER = struct.Struct("<4sHHIIQQ16s")
_HEADER = struct.Struct("<4sHHIIQQ16sQI")
HEADER_BYTES = _HEADER.size
Array = np.ndarray[Any, Any]

# Dense values of up to this many elements share messages, which cost as much as sending 64 KiB.
SMALL_SIZE = 1 << 14
PART_SIZE = 1 << 19
# The frame that names what a message is about: the number of entries, the entries, all ids.
_COUNT = struct.Struct("<Q")
_ENTRY = struct.Struct("<QfIQ")
IDS = 2**64 - 1

Place = Array | int  # ids in a table, or the first element of a range of a dense variable
Kinds = Sequence[tuple[Sequence[int], _core.WireFormat | None]]  # shapes and wire formats


class Op(enum.IntEnum):
    """The operation that a request asks for: its number, and how many frames may follow."""

    frames: tuple[int, ...]

    def __new__(cls, value: int, *frames: int) -> Op:
        """Make an operation, whose `frames` are the numbers of frames that it may have."""
        op = int.__new__(cls, value)
        op._value_, op.frames = value, frames
        return op

    CREATE = 1, 1, 2  # a spec, and a dense variable's initial value
    READ = 2, 1  # entries and ids
    CHANGE = 3, 2, 3  # entries and ids; gradients; entries and ids to read afterwards, if any
    ASSIGN = 4, 2  # entries and ids; values
    STATS = 5, 0
    SAVE = 6, 1  # JSON: part, common beginning of the files' paths
    RESTORE = 7, 1  # JSON: part, directory, names of files
    COMMIT = 8, 1  # JSON: weight, objects
    DISCARD = 9, 1  # JSON: a list of rounds
    RESET = 10, 0
    END = 11, 0


# Requests that are applied once, however often they arrive.
APPLIED_ONCE = frozenset((Op.CHANGE, Op.ASSIGN, Op.SAVE, Op.RESTORE, Op.COMMIT, Op.RESET))


class Status(enum.IntEnum):
    """The result of a request; every status but OK comes with a message."""

    OK = 0
    VALUE_ERROR = 1
    TYPE_ERROR = 2
    INDEX_ERROR = 3
    MEMORY_ERROR = 4
    FAILED = 5
    RESTARTED = 6
    OS_ERROR = 7
    BUSY = 8  # the client should ask again later, by the same number


class BusyError(Exception):
    """A server cannot answer now."""


class RestartedError(Exception):
    """A request names an object that an earlier server at this address kept."""


_ERRORS: dict[Status, type[Exception]] = {
    Status.VALUE_ERROR: ValueError,
    Status.TYPE_ERROR: TypeError,
    Status.INDEX_ERROR: IndexError,
    Status.MEMORY_ERROR: MemoryError,
    Status.FAILED: FastdistError,
    Status.OS_ERROR: OSError,
    Status.RESTARTED: RestartedError,
    Status.BUSY: BusyError,
}


@dataclass(frozen=True, slots=True)
class Header:
    """The first frame of a request or reply."""

    kind: int  # an `Op` in a request, a `Status` in a reply
    number: int  # of the request; a client counts its requests to each server from 1
    client: bytes  # 16 bytes that identify the client
    object: int = 0  # of the variable or table; the high 32 bits are the server's incarnation
    floor: int = 0  # the client has the replies to all requests before this number
    round: int = 0  # that a push waits for; 0 applies it at once
    place: int = 0  # of the push, in the sum of its round
    version: int = VERSION

    def pack(self) -> bytes:
        """Return the header as `HEADER_BYTES` bytes."""
        return _HEADER.pack(
            _MAGIC,
            self.version,
            self.kind,
            self.object & 0xFFFFFFFF,
            self.place,
            self.number,
            self.floor,
            self.client,
            self.round,
            self.object >> 32,
        )

    @classmethod
    def unpack(cls, data: bytes | memoryview) -> Header:
        """Parse a frame; raise ValueError if it is no header.

        Of a header of another version, fields that all versions have are parsed.
        """
        if len(data) < _COMMON_HEADER.size or bytes(data[:4]) != _MAGIC:
            raise ValueError(f"a first frame of {len(data)} bytes, not a header")
        _, version, kind, index, place, number, floor, client = _COMMON_HEADER.unpack_from(data)
        if version != VERSION:
            return cls(kind, number, client, index, floor, version=version)
        if len(data) != HEADER_BYTES:
            raise ValueError(f"a header of {len(data)} bytes, expected {HEADER_BYTES}")
        *_, round_, incarnation = _HEADER.unpack(data)
        return cls(kind, number, client, incarnation << 32 | index, floor, round_, place)


def kind_of(data: bytes | memoryview) -> int:
    """Return the kind in a header without parsing the rest; 0 if the frame is not a header."""
    return int.from_bytes(data[6:8], "little") if len(data) == HEADER_BYTES else 0


def message_bytes(op: Op, frames: Sequence[Any]) -> int:
    """Return the size of a request's frames; raise ValueError if servers would not accept one."""
    sizes = [memoryview(frame).nbytes for frame in frames]
    largest = max(sizes, default=0)
    if largest > MAX_FRAME_BYTES:
        raise ValueError(
            f"{op.name} with {largest} bytes at once, servers accept up to {MAX_FRAME_BYTES}: cut "
            "the variable with a partitioner, or split the ids into several requests"
        )
    return sum(sizes)


def status_of(error: Exception) -> Status:
    """Return the status that stands for an error in a reply."""
    found = (status for status, kind in _ERRORS.items() if isinstance(error, kind))
    return next(found, Status.FAILED)


def error_of(status: int, message: str, server: int) -> Exception:
    """Return the error that a server's reply stands for."""
    if status == Status.RESTARTED:
        return UnavailableError(message, (server,))
    return _ERRORS.get(Status(status), FastdistError)(message)


# --- names and values ----------------------------------------------------------------------------


def to_ids(ids: Any) -> Array:
    """Convert ids to contiguous 64-bit integers; raise TypeError if they are not integers."""
    array = np.ascontiguousarray(ids)
    if array.dtype.kind not in "iu":
        raise TypeError(f"ids must be integers, got {array.dtype}")
    return array if array.dtype.itemsize == 8 else array.astype(np.int64)


class Entry(NamedTuple):
    """The rows of a table, or the range of a dense variable, that a message reads or changes."""

    object: int  # the object's number
    lr: float  # the learning rate of a CHANGE; NaN: the update rule's own
    size: int  # number of the message's ids that are its own, or of the elements of the range
    begin: int = IDS  # the first element of the range; `IDS` for a table


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
