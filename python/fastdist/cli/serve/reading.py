"""A server's statistics at one moment, and the rates since the previous reading."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Reading:
    """The statistics of a server, with rates.

    Attributes:
        stats: the result of `Server.stats`.
        requests_per_s: since the previous reading, or since the server's start.
        steps_per_s: of each object, by its name.
    """

    stats: Mapping[str, Any]
    requests_per_s: float
    steps_per_s: Mapping[str, float]

    @classmethod
    def after(cls, before: Reading | None, stats: Mapping[str, Any]) -> Reading:
        """Create the reading that follows `before`; None for the first one."""
        earlier: Mapping[str, Any] = {} if before is None else before.stats
        seconds = stats["uptime_s"] - earlier.get("uptime_s", 0.0)
        steps = {entry["name"]: entry["steps"] for entry in earlier.get("objects", ())}

        def rate(now: int, then: int) -> float:
            return max(0, now - then) / seconds if seconds > 0 else 0.0

        return cls(
            stats,
            rate(stats["requests"], earlier.get("requests", 0)),
            {
                entry["name"]: rate(entry["steps"], steps.get(entry["name"], 0))
                for entry in stats["objects"]
            },
        )

    @property
    def nbytes(self) -> int:
        """Memory of all objects."""
        return sum(entry["nbytes"] for entry in self.stats["objects"])

    @property
    def rows(self) -> int:
        """Rows of all tables."""
        return sum(entry.get("rows", 0) for entry in self.stats["objects"])

    @property
    def steps(self) -> int:
        """Pushes to all objects."""
        return sum(entry["steps"] for entry in self.stats["objects"])

    @property
    def staleness(self) -> Mapping[str, int]:
        """Counts of pushes for each range of staleness, such as "2-3"."""
        found: Mapping[str, int] = self.stats["staleness"]
        return found
