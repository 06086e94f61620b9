"""A worker, as the coordinator's dispatcher knows it."""

from __future__ import annotations

import time

from fastdist.link.connections import Connection
from fastdist.ps.coordinator.backlog import Call
from fastdist.ps.coordinator.messages import Kind, pack
from fastdist.ps.coordinator.shipping import Definition

# Calls that a worker has at once, so that the next is there when one ends; more if they are short.
_MIN_WINDOW, _MAX_WINDOW = 2, 8
_SHORT_S = 1e-3


class WorkerLink:
    """A connection to a worker, and what has been sent over it.

    A worker ignores messages that arrive before the HELLO of a new connection.
    """

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.address = connection.address
        self.is_ready = False  # the worker accepts calls
        self.is_replaced = False  # the worker belongs to another coordinator
        self.calls: dict[int, Call] = {}  # by the dispatcher's numbers
        self.state_update = b""  # the last one that was sent
        self._window = _MIN_WINDOW
        self._ended_at = 0.0  # the last call, on the monotonic clock
        self.last_error = "no answer"  # why the worker is not available
        self._known: set[int] = set()

    @property
    def has_room(self) -> bool:
        """True if the worker should get another call."""
        return len(self.calls) < self._window

    def begin_call(self, number: int, call: Call) -> None:
        """Record a call that is about to be sent."""
        if not self.calls and time.monotonic() - self._ended_at > _SHORT_S:
            self._window = _MIN_WINDOW  # the next calls may be longer
        self.calls[number] = call

    def end_call(self, number: int) -> Call | None:
        """Record the end of a call; None if the call is unknown. Short calls widen the window."""
        call = self.calls.pop(number, None)
        now = time.monotonic()
        is_short = now - self._ended_at < _SHORT_S
        self._window = min(self._window + 1, _MAX_WINDOW) if is_short else _MIN_WINDOW
        self._ended_at = now
        return call

    def mark_lost(self) -> None:
        """Forget the worker's calls and definitions."""
        if self.connection.was_refused:
            self.last_error = "it has another secret, or is not a fastdist worker of this user"
        elif self.is_ready:
            self.last_error = "the connection was lost"
        self.is_ready = False
        self.calls.clear()
        self._known.clear()
        self.state_update = b""

    def send(self, kind: Kind, number: int = 0, *frames: bytes) -> None:
        """Send a message, which is lost with the connection."""
        self.connection.send(pack(kind, number), frames)

    def define(self, definition: Definition) -> None:
        """Send a definition, and those that it needs, unless the worker has them."""
        if definition.number in self._known:
            return
        for needed in definition.needs:
            self.define(needed)
        self._known.add(definition.number)
        self.send(Kind.DEFINE, definition.number, definition.blob)

    def forget(self, number: int) -> None:
        """Tell the worker to drop a definition."""
        if number in self._known:
            self._known.discard(number)
            self.send(Kind.FORGET, number)
