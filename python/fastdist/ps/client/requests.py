"""Requests that a client has sent: one to one server, or several that make one result."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import zmq

from fastdist.ps.wire.protocol import UNKNOWN_STEP, Header, Op

T = TypeVar("T")


@dataclass(slots=True)
class Ticket:
    """A request in flight, to be passed to `Client.wait`.

    The memory that `frames` refers to must not change until the ticket has been waited for: the
    request may be sent again.

    Attributes:
        timeout_s: seconds for which the server may stay silent.
        began: the time of the first send, on the monotonic clock.
        resend_at: when to send the request again; infinity: when the connection was restored.
        upload: for a large request, what knows when it is on its way.
        on_reply: called with the reply's body when it arrives; None: `wait` returns the body.
        step: in the reply to a pull, how many pushes the value has seen.

    Examples:
        >>> import numpy as np
        >>> from fastdist import ps
        >>> server = ps.Server()
        >>> client = ps.Client([server.address])
        >>> spec = ps.DenseSpec("w", (2,), ps.RuleSpec("SGD", {"lr": 0.5}))
        >>> number = client.create(0, spec, np.ones(2, np.float32))
        >>> value = np.empty(2, np.float32)
        >>> tickets = client.begin_pull(0, number, value)
        >>> _ = client.wait(tickets[0])
        >>> value
        array([1., 1.], dtype=float32)
        >>> client.close()
        >>> server.close()
    """

    server: int
    op: Op
    header: Header
    frames: Sequence[Any]
    timeout_s: float
    began: float
    on_reply: Callable[[memoryview], None] | None = None
    resend_at: float = math.inf
    upload: zmq.MessageTracker | None = None
    step: int = UNKNOWN_STEP
    reply: memoryview | None = None
    error: Exception | None = None
    is_done: bool = False


class Pending(Generic[T]):
    """Requests in flight that make one result; for the client's thread.

    Servers answer concurrent requests in any order: to pull a value that a push has changed, wait
    for the push first. The arrays that were sent must not change until `result` has returned.

    Args:
        wait: `Client.wait` of the client that sent the requests.
        tickets: for each piece, its requests.
        finish: makes the result from the replies to all tickets, in their order.

    Attributes:
        tickets: for each piece, its requests.

    Examples:
        >>> import numpy as np
        >>> from fastdist import ps
        >>> server = ps.Server()
        >>> client = ps.Client([server.address])
        >>> spec = ps.DenseSpec("w", (2,), ps.RuleSpec("SGD", {"lr": 0.5}))
        >>> number = client.create(0, spec, np.ones(2, np.float32))
        >>> value = np.empty(2, np.float32)
        >>> tickets = client.begin_pull(0, number, value)
        >>> ps.Pending(client.wait, [tickets], lambda replies: value).result()
        array([1., 1.], dtype=float32)
        >>> client.close()
        >>> server.close()
    """

    def __init__(
        self,
        wait: Callable[[Ticket], memoryview],
        tickets: Sequence[Sequence[Ticket]],
        finish: Callable[[list[memoryview]], T],
    ) -> None:
        self._wait = wait
        self.tickets = tickets
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
            tickets = list(itertools.chain.from_iterable(self.tickets))
            try:
                replies = [self._wait(ticket) for ticket in tickets]
            except Exception:
                for ticket in tickets:
                    ticket.on_reply = None
                raise
            self._result = self._finish(replies)
            self._is_finished = True
        return self._result

    @property
    def steps(self) -> tuple[int, ...]:
        """For a pull that has its result: how many pushes each piece's value has seen.

        Pass it to the push of the gradient. `UNKNOWN_STEP` for pieces without a request.
        """
        return tuple(
            min((ticket.step for ticket in tickets), default=UNKNOWN_STEP)
            for tickets in self.tickets
        )

    @property
    def step(self) -> int:
        """The smallest of `steps`."""
        return min(self.steps, default=UNKNOWN_STEP)


def wait_for_all(
    wait: Callable[[Ticket], memoryview], pendings: Sequence[Pending[None]]
) -> Pending[None]:
    """Combine several changes into one."""
    tickets = [tickets for pending in pendings for tickets in pending.tickets]
    return Pending(wait, tickets, lambda replies: None)
