"""A request that a client has sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fastdist import _core
from fastdist.ps.frames import Array
from fastdist.ps.protocol import UNKNOWN_STEP, Header, Op


@dataclass(slots=True)
class Ticket:
    """A request under way: what `Client.wait` takes.

    What its frames refer to must stay as it is until it has been waited for: it may be sent again.

    Attributes:
        step: in the reply to a pull, how many pushes the value has seen.
    """

    server: int
    op: Op
    header: Header
    frames: Sequence[Any]
    timeout_s: float
    deadline: float
    resend_at: float
    out: Array | None = None
    wire: _core.WireFormat | None = None
    sent: int = 1
    step: int = UNKNOWN_STEP
    reply: memoryview | None = None
    error: Exception | None = None
    is_done: bool = False

    @property
    def began(self) -> float:
        """When it was sent first, on the monotonic clock."""
        return self.deadline - self.timeout_s
