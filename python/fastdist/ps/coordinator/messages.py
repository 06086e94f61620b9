"""Messages between a coordinator and its workers: a header, then frames of pickled bytes."""

from __future__ import annotations

import enum
import struct
from collections.abc import Sequence

from fastdist.errors import FastdistError

VERSION = 1
_MAGIC = b"FDCO"
_HEADER = struct.Struct("<4sHHQ")  # magic, version, kind, number

CALL = struct.Struct("<QQI?")  # function, group of calls, its size, has_state
HELLO = struct.Struct("<QQI")  # time of the coordinator's start, seed, the worker's index
WEIGHT = struct.Struct("<d")


class Kind(enum.IntEnum):
    """The kinds of messages: their numbers, and the sizes of the frames after the header.

    None accepts any size. The comments say what the number in the header is, and the frames.
    """

    sizes: tuple[int | None, ...]

    def __new__(cls, value: int, *sizes: int | None) -> Kind:
        """Make a kind, whose `sizes` are those of its frames in bytes."""
        kind = int.__new__(cls, value)
        kind._value_, kind.sizes = value, sizes
        return kind

    # To a worker.
    HELLO = 1, 16, HELLO.size  # none; job, start time with seed and index
    DEFINE = 2, None  # definition; pickle
    FORGET = (3,)  # definition
    CALL = 4, CALL.size, None, None  # call; function with group, arguments, state update
    COMMIT = 5, WEIGHT.size  # call; sum of weights: commit the step for all
    RESUME = 6, None  # call; error of the step, or empty: it was taken
    ABORT = (7,)  # call: the step was not taken, because another worker was lost
    END = (8,)
    # To the coordinator.
    READY = (9,)
    RESULT = 10, 1, None, None  # call; outcome, result or exception, state update
    STAGED = 11, WEIGHT.size  # call; weight of staged gradients, NaN if they could not be staged
    COMMITTED = 12, None  # call; error of the commit, or empty
    REPLACED = (13,)  # a later coordinator has this worker
    REJECTED = 14, None  # none; error: the worker received a malformed message


TO_WORKER = [kind for kind in Kind if kind <= Kind.END]
TO_COORDINATOR = [kind for kind in Kind if kind > Kind.END]


class Outcome(enum.IntEnum):
    """The outcome of a function, in a RESULT."""

    RETURNED = 0
    RAISED = 1
    ABORTED = 2  # during a step of all workers; the function must run again


def pack(kind: Kind, number: int = 0) -> bytes:
    """Return a header."""
    return _HEADER.pack(_MAGIC, VERSION, kind, number)


def unpack(frames: Sequence[bytes], expected: Sequence[Kind]) -> tuple[Kind, int, Sequence[bytes]]:
    """Return kind, number and further frames of a message; FastdistError unless `expected`."""
    header = frames[0]
    if len(header) != _HEADER.size or not header.startswith(_MAGIC):
        raise FastdistError(
            f"a first frame of {len(header)} bytes, which is not a coordinator message"
        )
    _, version, value, number = _HEADER.unpack(header)
    if version != VERSION:
        raise FastdistError(
            f"a message of version {version}, expected {VERSION}: use the same version of fastdist "
            "in all tasks"
        )
    if value not in expected:
        known = ", ".join(f"{kind.name} = {kind}" for kind in expected)
        raise FastdistError(f"a message of kind {value}, expected {known}")
    kind = Kind(value)
    rest = frames[1:]
    got = [len(frame) for frame in rest]
    if len(got) != len(kind.sizes) or any(
        size not in (None, length) for size, length in zip(kind.sizes, got, strict=True)
    ):
        wanted = ", ".join("any" if size is None else str(size) for size in kind.sizes)
        raise FastdistError(f"a {kind.name} with frames of {got} bytes, expected [{wanted}]")
    return kind, number, rest
