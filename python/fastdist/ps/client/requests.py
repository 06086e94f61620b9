"""Requests that a client has sent: one to one server, or several that make one result."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from fastdist.ps.client.items import Destination
from fastdist.ps.link.connections import Connection
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
        resend_at: when to send the request again; infinity: when a new connection is made.
        destination: where the reply goes; None: `wait` returns it.
        arrives_at: the connection over which the reply is being received there.
        sendings: how often it was sent.
        was_busy: True if the server was too busy to reply; it has made the request's changes.

    Examples:
        >>> import numpy as np
        >>> from fastdist import ps
        >>> server = ps.Server()
        >>> client = ps.Client([server.address])
        >>> spec = ps.DenseSpec("w", (2,), ps.RuleSpec("SGD", {"lr": 0.5}))
        >>> number = client.create(0, spec, np.ones(2, np.float32))
        >>> item = ps.Item(0, number, np.empty(2, np.float32))
        >>> tickets = client.begin_read([item])
        >>> _ = client.wait(tickets[0])
        >>> item.values
        array([1., 1.], dtype=float32)
        >>> client.close()
        >>> server.close()
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
    reply: memoryview | None = None
    error: Exception | None = None
    is_done: bool = False
    was_busy: bool = False
    sendings: int = 0
    arrives_at: Connection | None = None

    def abandon(self) -> None:
        """Leave the memory for the reply alone from now on."""
        self.destination = None
        if self.arrives_at is not None and not self.is_done:
            self.arrives_at.lose()  # what is left of the reply would go there


class Pending(Generic[T]):
    """Requests in flight that make one result; for the client's thread.

    The arrays that were sent must not change until `result` has returned.

    Args:
        wait: `Client.wait` of the client that sent the requests.
        tickets: the requests.
        finish: makes the result from the replies to all tickets, in their order.

    Examples:
        >>> import numpy as np
        >>> from fastdist import ps
        >>> server = ps.Server()
        >>> client = ps.Client([server.address])
        >>> spec = ps.DenseSpec("w", (2,), ps.RuleSpec("SGD", {"lr": 0.5}))
        >>> number = client.create(0, spec, np.ones(2, np.float32))
        >>> item = ps.Item(0, number, np.empty(2, np.float32))
        >>> tickets = client.begin_read([item])
        >>> ps.Pending(client.wait, tickets, lambda replies: item.values).result()
        array([1., 1.], dtype=float32)
        >>> client.close()
        >>> server.close()
    """

    def __init__(
        self,
        wait: Callable[[Ticket], memoryview],
        tickets: Sequence[Ticket],
        finish: Callable[[list[memoryview]], T],
    ) -> None:
        self._wait = wait
        self._tickets = tickets
        self._finish = finish
        self._result: T
        self._is_finished = False

    def result(self) -> T:
        """Wait for all servers and return the result.

        If a server fails, replies that arrive later are not written to the caller's arrays.

        Raises:
            UnavailableError: a server does not answer, is gone, or was restarted.
            Exception: a server raised it.
        """
        if not self._is_finished:
            try:
                replies = [self._wait(ticket) for ticket in self._tickets]
            except Exception:
                for ticket in self._tickets:
                    ticket.abandon()
                raise
            self._result = self._finish(replies)
            self._is_finished = True
        return self._result


def no_result(replies: list[memoryview]) -> None:
    """The result of a change."""
