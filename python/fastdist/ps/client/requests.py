"""What has been asked of several servers, until it is waited for."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from fastdist.ps.client.client import Client
from fastdist.ps.client.ticket import Ticket
from fastdist.ps.wire.protocol import UNKNOWN_STEP

T = TypeVar("T")


class Pending(Generic[T]):
    """Requests that are under way; for the client's thread.

    Servers answer requests that are under way at the same time in any order: who wants to pull what
    a push has changed waits for the push first.

    What they send must stay as it is until `result` has returned: it may be sent again.

    Args:
        client: that sent them.
        tickets: those for each piece.
        finish: makes the result of the replies to all tickets, in their order.

    Attributes:
        tickets: those for each piece.
    """

    def __init__(
        self,
        client: Client,
        tickets: Sequence[Sequence[Ticket]],
        finish: Callable[[list[memoryview]], T],
    ) -> None:
        self._client = client
        self.tickets = tickets
        self._finish = finish
        self._result: T
        self._is_finished = False

    def result(self) -> T:
        """Wait for all servers.

        What comes when one of them has failed is not written to where it was wanted.

        Raises:
            UnavailableError: a server does not answer, is gone, or is another one since.
            Exception: what a server raised.
        """
        if not self._is_finished:
            tickets = list(itertools.chain.from_iterable(self.tickets))
            try:
                replies = [self._client.wait(ticket) for ticket in tickets]
            except Exception:
                for ticket in tickets:
                    ticket.take = None
                raise
            self._result = self._finish(replies)
            self._is_finished = True
        return self._result

    @property
    def steps(self) -> tuple[int, ...]:
        """Of a pull, when it has its result: pushes that each piece's value has seen.

        What `begin_push` takes with the gradient. `UNKNOWN_STEP` for a piece that was not asked.
        """
        return tuple(
            min((ticket.step for ticket in tickets), default=UNKNOWN_STEP)
            for tickets in self.tickets
        )

    @property
    def step(self) -> int:
        """The smallest of `steps`."""
        return min(self.steps, default=UNKNOWN_STEP)


def all_of(client: Client, pendings: Sequence[Pending[None]]) -> Pending[None]:
    """Several changes as one."""
    tickets = [tickets for pending in pendings for tickets in pending.tickets]
    return Pending(client, tickets, lambda replies: None)
