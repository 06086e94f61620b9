"""Groups of calls that take their optimizer steps together (synchronous mode)."""

from __future__ import annotations

import math

from fastdist.ps.coordinator.messages import WEIGHT, Kind
from fastdist.ps.coordinator.worker_link import WorkerLink


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
