"""What a coordinator and its workers send each other: a header, then frames of pickled bytes."""

from __future__ import annotations

import enum
import struct

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


class Outcome(enum.IntEnum):
    """How a function ended, in a RESULT."""

    RETURNED = 0
    RAISED = 1
    ABORTED = 2  # in the middle of a step of all workers; it is to run again


def pack(kind: Kind, number: int = 0) -> bytes:
    """A header."""
    return _HEADER.pack(_MAGIC, VERSION, kind, number)


def unpack(frame: bytes) -> tuple[Kind, int]:
    """Kind and number of a header.

    Raises:
        FastdistError: it is none, or of another version.
    """
    if len(frame) != _HEADER.size or not frame.startswith(_MAGIC):
        raise FastdistError(f"a first frame of {len(frame)} bytes, not a coordinator's or worker's")
    _, version, kind, number = _HEADER.unpack(frame)
    if version != VERSION:
        raise FastdistError(
            f"a message of version {version}, expected {VERSION}: use the same version of fastdist "
            "in all tasks"
        )
    return Kind(kind), number


def set_options(socket: zmq.Socket[bytes]) -> None:
    """What both ends need: silence is noticed, and nothing is kept for who is not there."""
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _SILENCE_MS)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
