"""What clients and servers send each other; docs/ps_protocol.md is the description for people."""

from __future__ import annotations

import enum
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fastdist.errors import FastdistError, UnavailableError

VERSION = 4
MAX_META_BYTES = 64 << 10
MAX_LONG_META_BYTES = 4 << 20  # of what names many objects or files
MAX_FRAME_BYTES = 2**31 - 1
UNKNOWN_STEP = 2**64 - 1
_MAGIC = b"FDPS"
# magic, version, kind, object, learning rate, number, floor, client: the same in all versions, so
# that each can tell every other what is wrong. Then round, step, incarnation, part.
_OF_ALL_VERSIONS = struct.Struct("<4sHHIfQQ16s")
_HEADER = struct.Struct("<4sHHIfQQ16sQQII")
HEADER_BYTES = _HEADER.size


class Op(enum.IntEnum):
    """What a request asks for, and the frames after its header."""

    HELLO = 1  # none
    CREATE = 2  # a spec, and a dense variable's initial value
    PULL = 3  # none
    PUSH = 4  # a gradient
    ASSIGN = 5  # a value
    PULL_ROWS = 6  # ids
    PUSH_ROWS = 7  # ids, gradients
    ASSIGN_ROWS = 8  # ids, values
    STATS = 9  # none
    SAVE = 10  # JSON: part, path that names of files begin with
    RESTORE = 11  # JSON: part, directory, names of files
    COMMIT = 12  # JSON: weight, objects
    DISCARD = 13  # JSON: a list of rounds
    RESET = 14  # none
    END = 15  # none
    PULL_MANY = 16  # numbers
    PUSH_MANY = 17  # numbers, steps and learning rates; gradients


FRAMES = {
    Op.HELLO: (0,),
    Op.CREATE: (1, 2),
    Op.PULL: (0,),
    Op.PUSH: (1,),
    Op.ASSIGN: (1,),
    Op.PULL_ROWS: (1,),
    Op.PUSH_ROWS: (2,),
    Op.ASSIGN_ROWS: (2,),
    Op.STATS: (0,),
    Op.SAVE: (1,),
    Op.RESTORE: (1,),
    Op.COMMIT: (1,),
    Op.DISCARD: (1,),
    Op.RESET: (0,),
    Op.END: (0,),
    Op.PULL_MANY: (1,),
    Op.PUSH_MANY: (2,),
}
# Applied once, however often they arrive.
CHANGES = frozenset(
    (
        Op.PUSH,
        Op.PUSH_ROWS,
        Op.PUSH_MANY,
        Op.ASSIGN,
        Op.ASSIGN_ROWS,
        Op.SAVE,
        Op.RESTORE,
        Op.COMMIT,
        Op.RESET,
    )
)


class Status(enum.IntEnum):
    """What became of a request; all but OK come with a message."""

    OK = 0
    VALUE_ERROR = 1
    TYPE_ERROR = 2
    INDEX_ERROR = 3
    MEMORY_ERROR = 4
    FAILED = 5
    OTHER_VERSION = 6
    RESTARTED = 7
    OS_ERROR = 8


_ERRORS: dict[Status, type[Exception]] = {
    Status.VALUE_ERROR: ValueError,
    Status.TYPE_ERROR: TypeError,
    Status.INDEX_ERROR: IndexError,
    Status.MEMORY_ERROR: MemoryError,
    Status.FAILED: FastdistError,
    Status.OTHER_VERSION: FastdistError,
    Status.OS_ERROR: OSError,
}


class ProtocolError(Exception):
    """A message that no client of fastdist has made."""


class RestartedError(Exception):
    """A request for an object of a server that was here before."""


class VersionError(Exception):
    """A message of another version of the protocol; its `header` is readable."""

    def __init__(self, header: Header, version: int) -> None:
        super().__init__(
            f"the server speaks version {VERSION} of the protocol, the client version {version}; "
            "use the same version of fastdist"
        )
        self.header = header


@dataclass(frozen=True, slots=True)
class Header:
    """The first frame of a request or reply.

    Attributes:
        kind: an `Op` in a request, a `Status` in a reply.
        number: of the request; a client counts those to each server.
        client: 16 bytes that no other client has.
        object: number of the variable or table; its high 32 bits are the server's incarnation.
        floor: the client has got the replies to all requests before this number.
        lr: learning rate of a push; NaN for the update rule's own.
        round: that a push waits for; 0: it is applied at once.
        step: pushes that a value has seen: in the reply to a pull, of that value; in a push, of the
            one that the gradient was computed from.
        part: of a dense value, see `fastdist.ps.wire.parts`.
    """

    kind: int
    number: int
    client: bytes
    object: int = 0
    floor: int = 0
    lr: float = float("nan")
    round: int = 0
    step: int = UNKNOWN_STEP
    part: int = 0

    def pack(self) -> bytes:
        """`HEADER_BYTES` bytes."""
        return _HEADER.pack(
            _MAGIC,
            VERSION,
            self.kind,
            self.object & 0xFFFFFFFF,
            self.lr,
            self.number,
            self.floor,
            self.client,
            self.round,
            self.step,
            self.object >> 32,
            self.part,
        )

    @classmethod
    def unpack(cls, data: bytes | memoryview) -> Header:
        """The header in a frame.

        Raises:
            ProtocolError: it is none.
            VersionError: it is of another version.
        """
        if len(data) < _OF_ALL_VERSIONS.size or bytes(data[:4]) != _MAGIC:
            raise ProtocolError(f"a first frame of {len(data)} bytes, not a header")
        _, version, kind, index, lr, number, floor, client = _OF_ALL_VERSIONS.unpack_from(data)
        if version != VERSION:
            raise VersionError(cls(kind, number, client, index, floor, lr), version)
        if len(data) != HEADER_BYTES:
            raise ProtocolError(f"a header of {len(data)} bytes, expected {HEADER_BYTES}")
        *_, round_, step, incarnation, part = _HEADER.unpack(data)
        object_ = incarnation << 32 | index
        return cls(kind, number, client, object_, floor, lr, round_, step, part)


def kind_of(data: bytes | memoryview) -> int:
    """The kind that a header names, without looking at the rest; 0 where there is none."""
    return int.from_bytes(data[6:8], "little") if len(data) == HEADER_BYTES else 0


def message_bytes(op: Op, frames: Sequence[Any]) -> int:
    """The bytes of a request's frames.

    Raises:
        ValueError: one is larger than servers take.
    """
    sizes = [memoryview(frame).nbytes for frame in frames]
    largest = max(sizes, default=0)
    if largest > MAX_FRAME_BYTES:
        raise ValueError(
            f"{op.name} with {largest} bytes at once, servers take up to {MAX_FRAME_BYTES}: cut "
            "the variable with a partitioner, or the ids into several requests"
        )
    return sum(sizes)


def status_of(error: Exception) -> Status:
    """How a reply names an error."""
    if isinstance(error, RestartedError):
        return Status.RESTARTED
    for status, kind in _ERRORS.items():
        if isinstance(error, kind):
            return status
    return Status.FAILED


def error_of(status: int, message: str, server: int) -> Exception:
    """The error that a reply of a server tells of."""
    if status == Status.RESTARTED:
        return UnavailableError(message, (server,))
    return _ERRORS.get(Status(status), FastdistError)(message)
