"""Workers as the dispatcher knows them, and groups of their calls (synchronous mode)."""

from __future__ import annotations

import math
import time

from fastdist.link.connections import Connection
from fastdist.ps.coordinator.backlog import Call
from fastdist.ps.coordinator.messages import WEIGHT, Kind, pack
from fastdist.ps.coordinator.shipping import Definition

# Calls that a worker has at once, so that the next is there when one ends; more if they are short.
_MIN_WINDOW, _MAX_WINDOW = 2, 8
_SHORT_S = 1e-3


class WorkerLink:
    """A connection to a worker, and what has been sent over it."""

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


class Group:
    """One call on each worker. A step ends when all running calls have staged their gradients.

    The first call to do so becomes the leader, which commits the step for all; the others wait for
    it. If a worker is lost before all have staged their gradients, the servers cannot separate its
    gradients from the others': the step is aborted, and its calls run again. If a worker is lost
    later, the step is taken anyway; if that worker is the leader, which may have begun to commit,
    the next call becomes the leader. If a call could not stage its gradients, or the leader could
    not commit, all calls get its error.
    """

    def __init__(self) -> None:
        self.links: dict[int, WorkerLink] = {}  # of the calls, by number
        self._weights: dict[int, float] = {}
        self._leader: int | None = None
        self._total = 0.0  # sum of the weights, once there is a leader
        self._is_aborted = False

    def staged(self, number: int, weight: float) -> None:
        """Record that a call has staged the gradients of a step."""
        link = self.links.get(number)
        if link is None:
            return
        if self._is_aborted:
            link.send(Kind.ABORT, number)
            return
        self._weights[number] = weight
        self._commit_if_complete()

    def committed(self, number: int, error: bytes) -> None:
        """Record that the leader has committed the step, or its error."""
        if number != self._leader:  # lost in the meantime
            return
        if error:
            del self._weights[number]  # the leader has raised the error itself
        self._end_step(Kind.RESUME, error)

    def leave(self, number: int) -> None:
        """Remove a call that has ended."""
        if number == self._leader:
            self.committed(number, b"its function ended without committing the step")
        self.links.pop(number, None)
        self._weights.pop(number, None)
        self._commit_if_complete()

    def lose(self, number: int) -> None:
        """Remove a call whose worker was lost."""
        if self.links.pop(number, None) is None:
            return
        self._weights.pop(number, None)
        if self._leader is None or (number == self._leader and math.isnan(self._total)):
            self._is_aborted = True
            self._end_step(Kind.ABORT)
            self._commit_if_complete()
        elif number == self._leader:
            self._start_commit()

    def _end_step(self, kind: Kind, *frames: bytes) -> None:
        """Tell the calls that have staged their gradients how the step ended."""
        self._leader = None
        weights, self._weights = self._weights, {}
        for number in weights:
            self.links[number].send(kind, number, *frames)

    def _commit_if_complete(self) -> None:
        if not self.links:
            self._is_aborted = False
            return
        if self._leader is None and len(self._weights) == len(self.links):
            self._total = math.fsum(self._weights.values())  # in any order
            self._start_commit()

    def _start_commit(self) -> None:
        """Make a call the leader: one that could not stage its gradients if any, else the first."""
        failed = [number for number, weight in self._weights.items() if math.isnan(weight)]
        self._leader = next(iter(failed or self._weights), None)
        if self._leader is not None:
            total = WEIGHT.pack(self._total)
            self.links[self._leader].send(Kind.COMMIT, self._leader, total)
