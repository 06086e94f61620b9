"""What a coordinator and its workers send each other: a header, then frames of pickled bytes."""

from __future__ import annotations

import enum
import struct
from collections.abc import Mapping, Sequence

import zmq

from fastdist.errors import FastdistError

VERSION = 1
_MAGIC = b"FDCO"
_HEADER = struct.Struct("<4sHHQ")  # magic, version, kind, number
_HEARTBEAT_MS = 1_000
_SILENCE_MS = 10_000


CALL = struct.Struct("<QQI?")  # function, group of calls, how many are in it, whether it has state
HELLO = struct.Struct("<QQI")  # when the coordinator began, seed, the worker's index
WEIGHT = struct.Struct("<d")


class Kind(enum.IntEnum):
    """What a message is, what its number says, and its frames."""

    # To a worker.
    HELLO = 1  # job; when it began, seed and index
    DEFINE = 2  # of the definition; what it is
    FORGET = 3  # of the definition
    CALL = 4  # of the call; number of the function's definition, arguments, news
    LEAD = 5  # of the call; sum of weights: commit the step for all
    GO = 6  # of the call: the step is done; or why it is not
    ABORT = 7  # of the call: the step is not done, another worker was lost
    END = 8
    # To the coordinator.
    READY = 9
    RESULT = 10  # of the call; outcome, what it returned or raised, news
    STEP = 11  # of the call; weight: its gradients of a step are staged; NaN: they could not be
    LED = 12  # of the call: the step is committed for all; or why it is not
    TAKEN = 13  # a later coordinator has this worker
    REFUSED = 14  # what was sent is no message; why


Sizes = tuple[int | None, ...]
"""The bytes of each frame after the header; None: any."""

TO_WORKER: Mapping[Kind, Sizes] = {
    Kind.HELLO: (16, HELLO.size),
    Kind.DEFINE: (None,),
    Kind.FORGET: (),
    Kind.CALL: (CALL.size, None, None),
    Kind.LEAD: (WEIGHT.size,),
    Kind.GO: (None,),
    Kind.ABORT: (),
    Kind.END: (),
}
TO_COORDINATOR: Mapping[Kind, Sizes] = {
    Kind.READY: (),
    Kind.RESULT: (1, None, None),
    Kind.STEP: (WEIGHT.size,),
    Kind.LED: (None,),
    Kind.TAKEN: (),
    Kind.REFUSED: (None,),
}


class Outcome(enum.IntEnum):
    """How a function ended, in a RESULT."""

    RETURNED = 0
    RAISED = 1
    ABORTED = 2  # in the middle of a step of all workers; it is to run again


def pack(kind: Kind, number: int = 0) -> bytes:
    """A header."""
    return _HEADER.pack(_MAGIC, VERSION, kind, number)


def unpack(
    frames: Sequence[bytes], expected: Mapping[Kind, Sizes]
) -> tuple[Kind, int, Sequence[bytes]]:
    """Kind and number of a message, and what follows its header.

    Args:
        frames: of the message.
        expected: `TO_WORKER` or `TO_COORDINATOR`.

    Raises:
        FastdistError: it is none, of another version, or none of those.
    """
    header = frames[0]
    if len(header) != _HEADER.size or not header.startswith(_MAGIC):
        raise FastdistError(
            f"a first frame of {len(header)} bytes, not a coordinator's or worker's"
        )
    _, version, kind, number = _HEADER.unpack(header)
    if version != VERSION:
        raise FastdistError(
            f"a message of version {version}, expected {VERSION}: use the same version of fastdist "
            "in all tasks"
        )
    sizes = expected.get(kind)
    if sizes is None:
        known = ", ".join(f"{one.name} = {one}" for one in expected)
        raise FastdistError(f"a message of kind {kind}, expected {known}")
    rest = frames[1:]
    if len(rest) != len(sizes):
        raise _wrong_frames(kind, sizes, rest)
    for size, frame in zip(sizes, rest, strict=True):
        if size is not None and len(frame) != size:
            raise _wrong_frames(kind, sizes, rest)
    return Kind(kind), number, rest


def _wrong_frames(kind: int, sizes: Sizes, got: Sequence[bytes]) -> FastdistError:
    expected = ", ".join("any" if size is None else str(size) for size in sizes)
    return FastdistError(
        f"a {Kind(kind).name} with frames of {[len(frame) for frame in got]} bytes, expected "
        f"[{expected}]"
    )


def set_options(socket: zmq.Socket[bytes]) -> None:
    """What both ends need: silence is noticed, and nothing is kept for who is not there."""
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _SILENCE_MS)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
