"""Requests that a client has sent: one to one server, or several that make one result."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from fastdist.link.connections import Connection
from fastdist.ps.client.items import Destination
from fastdist.ps.wire.protocol import Header, Op

T = TypeVar("T")


@dataclass(slots=True)
class Ticket:
    """A request in flight, to be passed to `Client.wait`.

    The memory that `frames` refers to must not change until the ticket has been waited for: the
    request may be sent again.

    Attributes:
        timeout_s: seconds for which the server may stay silent.
        began: the time of the first send, on the monotonic clock.
        resend_at: the time to send the request again; infinity: when a new connection is made.
        destination: the object that takes the reply; None: `wait` returns it.
        arrives_at: the connection over which the reply is being received there.
        sendings: the number of times it was sent.
        asked_anew: True if it waits for one more connection.
        was_busy: True if the server was too busy to reply; it has made the request's changes.
    """

    server: int
    op: Op
    header: Header
    frames: Sequence[Any]
    nbytes: int
    timeout_s: float
    began: float
    destination: Destination | None = None
    resend_at: float = math.inf
    reply: memoryview | None = None  # unless it goes to the destination
    error: Exception | None = None
    is_done: bool = False
    asked_anew: bool = False
    was_busy: bool = False
    sendings: int = 0
    arrives_at: Connection | None = None

    def abandon(self) -> None:
        """Leave the memory for the reply alone from now on."""
        self.destination = None
        if self.arrives_at is not None and not self.is_done:
            self.arrives_at.lose()  # what is left of the reply would go there


@dataclass(slots=True, eq=False)
class Pending(Generic[T]):
    """Requests in flight that make one result; for the client's thread.

    The arrays that were sent must not change until `result` has returned.

    Args:
        wait: `Client.wait` of the client that sent the requests.
        tickets: the requests.
        finish: a function that makes the result from the replies to all tickets, in their order.
    """

    wait: Callable[[Ticket], memoryview]
    tickets: Sequence[Ticket]
    finish: Callable[[list[memoryview]], T]
    _result: T = field(init=False)
    _is_finished: bool = field(default=False, init=False)

    def result(self) -> T:
        """Wait for all servers and return the result.

        If a server fails, replies that arrive later are not written to the caller's arrays.

        Raises:
            UnavailableError: a server does not answer, is gone, or was restarted.
            Exception: a server raised it.
        """
        if not self._is_finished:
            try:
                replies = [self.wait(ticket) for ticket in self.tickets]
            except Exception:
                for ticket in self.tickets:
                    ticket.abandon()
                raise
            self._result = self.finish(replies)
            self._is_finished = True
        return self._result
