"""Messages with tags, and from any rank, on host arrays."""

from __future__ import annotations

import operator
from typing import Any

import fastdist._core as _core
from fastdist.collectives.types import Array, Ranks, Work
from fastdist.errors import UnsupportedError

_ANY_RANK = -1
_MOST = (1 << 63) - 1


class Messages:
    """The messages with tags, and from any rank, of one rank."""

    def __init__(self, comm: Ranks, timeout_s: float) -> None:
        if comm.engine.compiled is None:
            raise UnsupportedError("messages of a TPU have no tags")
        self._comm, self._timeout_s = comm, timeout_s
        self._calls = _core.Messages(comm.engine.compiled).calls()

    def send(self, array: Array, dst: int, tag: int, timeout: float | None, async_op: bool) -> Any:
        """Send to a rank; see `Communicator.send`."""
        return self._calls["send"](array, dst, _to_tag(tag), self._seconds(timeout), async_op)

    def recv(self, array: Array, src: int, tag: int, timeout: float | None, async_op: bool) -> Any:
        """Receive from a rank; see `Communicator.recv`."""
        return self._calls["recv"](array, src, _to_tag(tag), True, self._seconds(timeout), async_op)

    def recv_any(self, array: Array, tag: int, timeout: float | None, async_op: bool) -> Any:
        """Receive from the rank that sends first; see `Communicator.recv_any`."""
        got = self._calls["recv"](
            array, _ANY_RANK, _to_tag(tag), True, self._seconds(timeout), async_op
        )
        return _Source(got) if async_op else got.source

    def _seconds(self, timeout: float | None) -> float:
        return self._timeout_s if timeout is None else timeout


def _to_tag(tag: Any) -> int:
    try:
        value = operator.index(tag)
    except TypeError:
        value = -1
    if not 0 <= value <= _MOST:
        raise ValueError(f"tag must be an integer from 0 to 2**63 - 1, got {tag!r}")
    return value


class _Source:
    """A `recv_any` that has not ended: its result is the rank that has sent."""

    def __init__(self, work: Work) -> None:
        self._work = work

    def is_done(self) -> bool:
        """See `Work.is_done`."""
        return self._work.is_done()

    def wait(self, timeout: float | None = None) -> int:
        """See `Work.wait`."""
        source: int = self._work.wait(timeout).source
        return source
