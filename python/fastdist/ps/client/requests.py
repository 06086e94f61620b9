"""Requests that a client has sent."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fastdist.link.connections import Connection
from fastdist.ps.client.items import Destination
from fastdist.ps.wire.protocol import Header, Op


@dataclass(slots=True)
class Ticket:
    """A request in flight, to be passed to `Client.wait` or `wait_all`.

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
