"""Messages between a coordinator and its workers: a header, then frames of pickled bytes."""

from __future__ import annotations

import enum
import struct
from collections.abc import Mapping, Sequence

from fastdist.errors import FastdistError

VERSION = 1
_MAGIC = b"FDCO"
_HEADER = struct.Struct("<4sHHQ")  # magic, version, kind, number

CALL = struct.Struct("<QQI?")  # function, group of calls, its size, has_state
HELLO = struct.Struct("<QQI")  # time of the coordinator's start, seed, the worker's index
WEIGHT = struct.Struct("<d")


class Kind(enum.IntEnum):
    """The kinds of messages; the comments give the number's meaning, and the frames."""

    # To a worker.
    HELLO = 1  # none; job, start time with seed and index
    DEFINE = 2  # definition; pickle
    FORGET = 3  # definition
    CALL = 4  # call; function with group, arguments, state update
    COMMIT = 5  # call; sum of weights: commit the step for all
    RESUME = 6  # call; error of the step, or empty: it was taken
    ABORT = 7  # call: the step was not taken, because another worker was lost
    END = 8
    # To the coordinator.
    READY = 9
    RESULT = 10  # call; outcome, result or exception, state update
    STAGED = 11  # call; weight of the staged gradients, NaN if they could not be staged
    COMMITTED = 12  # call; error of the commit, or empty
    REPLACED = 13  # a later coordinator has this worker
    REJECTED = 14  # none; error: the worker received a malformed message


Sizes = tuple[int | None, ...]
"""Size of each frame after the header, in bytes; None accepts any size."""

TO_WORKER: Mapping[Kind, Sizes] = {
    Kind.HELLO: (16, HELLO.size),
    Kind.DEFINE: (None,),
    Kind.FORGET: (),
    Kind.CALL: (CALL.size, None, None),
    Kind.COMMIT: (WEIGHT.size,),
    Kind.RESUME: (None,),
    Kind.ABORT: (),
    Kind.END: (),
}
TO_COORDINATOR: Mapping[Kind, Sizes] = {
    Kind.READY: (),
    Kind.RESULT: (1, None, None),
    Kind.STAGED: (WEIGHT.size,),
    Kind.COMMITTED: (None,),
    Kind.REPLACED: (),
    Kind.REJECTED: (None,),
}


class Outcome(enum.IntEnum):
    """The outcome of a function, in a RESULT."""

    RETURNED = 0
    RAISED = 1
    ABORTED = 2  # during a step of all workers; the function must run again


def pack(kind: Kind, number: int = 0) -> bytes:
    """Return a header."""
    return _HEADER.pack(_MAGIC, VERSION, kind, number)


def unpack(
    frames: Sequence[bytes], expected: Mapping[Kind, Sizes]
) -> tuple[Kind, int, Sequence[bytes]]:
    """Return kind, number and further frames of a message; FastdistError unless `expected`."""
    header = frames[0]
    if len(header) != _HEADER.size or not header.startswith(_MAGIC):
        raise FastdistError(
            f"a first frame of {len(header)} bytes, which is not a coordinator message"
        )
    _, version, kind, number = _HEADER.unpack(header)
    if version != VERSION:
        raise FastdistError(
            f"a message of version {version}, expected {VERSION}: use the same version of fastdist "
            "in all tasks"
        )
    sizes = expected.get(kind)
    if sizes is None:
        known = ", ".join(f"{kind_.name} = {kind_}" for kind_ in expected)
        raise FastdistError(f"a message of kind {kind}, expected {known}")
    rest = frames[1:]
    got = [len(frame) for frame in rest]
    if len(got) != len(sizes) or any(
        size not in (None, length) for size, length in zip(sizes, got, strict=True)
    ):
        wanted = ", ".join("any" if size is None else str(size) for size in sizes)
        raise FastdistError(f"a {Kind(kind).name} with frames of {got} bytes, expected [{wanted}]")
    return Kind(kind), number, rest
