"""Calls whose optimizer steps are taken together (the synchronous mode)."""

from __future__ import annotations

import math

from fastdist.ps.coordinator.messages import WEIGHT, Kind
from fastdist.ps.coordinator.worker_link import WorkerLink


class Group:
    """One call on each worker. A step ends when all that still run have staged their gradients.

    The first that has commits the step for all; the others wait until it has. When a worker is
    lost before all have staged theirs, what it had staged cannot be told from the rest: the step is
    given up, and the calls that were in it run again. Later, the step is taken nevertheless, by the
    next where the first is lost: it may have begun to. When one could not stage its gradients, or
    the first could not commit, all get its error.
    """

    def __init__(self) -> None:
        self._links: dict[int, WorkerLink] = {}
        self._weights: dict[int, float] = {}
        self._leader: int | None = None
        self._total = 0.0  # of the weights, when there is a leader
        self._is_aborted = False

    def __bool__(self) -> bool:
        return bool(self._links)

    def add(self, number: int, link: WorkerLink) -> None:
        """A call has been sent."""
        self._links[number] = link

    def arrive(self, number: int, weight: float) -> None:
        """A call has staged the gradients of a step."""
        link = self._links.get(number)
        if link is None:
            return
        if self._is_aborted:
            link.send(Kind.ABORT, number)
            return
        self._weights[number] = weight
        self._go_on()

    def led(self, number: int, error: bytes) -> None:
        """The leader has committed the step, or says why it could not."""
        if number != self._leader:  # it was lost before this came
            return
        self._leader = None
        weights, self._weights = self._weights, {}
        if error:
            del weights[number]  # it has raised that
        for other in weights:
            if other in self._links:
                self._links[other].send(Kind.GO, other, error)

    def leave(self, number: int) -> None:
        """A call has ended."""
        if number == self._leader:
            self.led(number, b"an end of its function")
        self._links.pop(number, None)
        self._weights.pop(number, None)
        self._go_on()

    def lose(self, number: int) -> None:
        """The worker that had a call is gone."""
        if self._links.pop(number, None) is None:
            return
        if self._leader is None or (number == self._leader and math.isnan(self._total)):
            self._abort()
            return
        del self._weights[number]
        if number == self._leader:
            self._lead()

    def _abort(self) -> None:
        self._is_aborted = True
        self._leader = None
        weights, self._weights = self._weights, {}
        for other in weights:
            if other in self._links:
                self._links[other].send(Kind.ABORT, other)
        self._go_on()

    def _go_on(self) -> None:
        if not self._links:
            self._is_aborted = False
            return
        if self._leader is None and len(self._weights) == len(self._links):
            self._total = sum(self._weights.values())
            self._lead()

    def _lead(self) -> None:
        """Have a call commit the step; one whose gradients are missing, where there is any."""
        failed = [number for number, weight in self._weights.items() if math.isnan(weight)]
        self._leader = next(iter(failed or self._weights), None)
        if self._leader is not None:
            total = WEIGHT.pack(self._total)
            self._links[self._leader].send(Kind.LEAD, self._leader, total)
