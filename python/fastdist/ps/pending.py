"""What has been asked of several servers, until it is waited for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from fastdist.ps.client import Client, Ticket
from fastdist.ps.protocol import UNKNOWN_STEP

T = TypeVar("T")


class Pending(Generic[T]):
    """Requests that are under way; for the client's thread.

    Servers answer requests that are under way at the same time in any order: who wants to pull what
    a push has changed waits for the push first.

    What they send must stay as it is until `result` has returned: it may be sent again.

    Args:
        client: that sent them.
        tickets: one for each piece; None for a piece that was not asked.
        finish: makes the result of the replies, in the order of the pieces that were asked.
    """

    def __init__(
        self,
        client: Client,
        tickets: Sequence[Ticket | None],
        finish: Callable[[list[memoryview]], T],
    ) -> None:
        self._client = client
        self._tickets = tickets
        self._finish = finish
        self._result: T
        self._is_finished = False

    def result(self) -> T:
        """Wait for all servers.

        Raises:
            UnavailableError: a server does not answer, is gone, or is another one since.
            Exception: what a server raised.
        """
        if not self._is_finished:
            tickets = [ticket for ticket in self._tickets if ticket is not None]
            self._result = self._finish([self._client.wait(ticket) for ticket in tickets])
            self._is_finished = True
        return self._result

    @property
    def steps(self) -> tuple[int, ...]:
        """Of a pull, when it has its result: pushes that each piece's value has seen.

        What `begin_push` takes with the gradient. `UNKNOWN_STEP` for a piece that was not asked.
        """
        return tuple(UNKNOWN_STEP if t is None else t.step for t in self._tickets)

    @property
    def step(self) -> int:
        """The smallest of `steps`."""
        return min(self.steps, default=UNKNOWN_STEP)
