"""A request that a client has sent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fastdist.ps.wire.protocol import UNKNOWN_STEP, Header, Op


@dataclass(slots=True)
class Ticket:
    """A request under way: what `Client.wait` takes.

    What its frames refer to must stay as it is until it has been waited for: it may be sent again.

    Attributes:
        retry_s: without a reply it is sent again after so long.
        take: is given the reply's body when it comes; None: `wait` returns it.
        step: in the reply to a pull, how many pushes the value has seen.
    """

    server: int
    op: Op
    header: Header
    frames: Sequence[Any]
    timeout_s: float
    retry_s: float
    deadline: float
    resend_at: float
    take: Callable[[memoryview], None] | None = None
    sent: int = 1
    step: int = UNKNOWN_STEP
    reply: memoryview | None = None
    error: Exception | None = None
    is_done: bool = False

    @property
    def began(self) -> float:
        """When it was sent first, on the monotonic clock."""
        return self.deadline - self.timeout_s
