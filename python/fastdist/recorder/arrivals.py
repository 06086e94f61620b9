"""Arrivals of the ranks at the last collectives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fastdist.recorder.observation import ObservedRank
from fastdist.recorder.ring import Call


@dataclass(frozen=True, slots=True)
class Arrivals:
    """The arrivals of ranks at one collective.

    Attributes:
        call: as one of the ranks made it.
        came_s: seconds after the first rank, by rank; ranks that have not come are not in it.
    """

    call: Call
    came_s: dict[int, float]

    @property
    def spread_s(self) -> float:
        """Seconds between the first and the last rank."""
        return max(self.came_s.values())


def arrivals(ranks: Sequence[ObservedRank], most: int) -> list[Arrivals]:
    """Return the arrivals at the last `most` collectives of the communicator with most ranks."""
    by_call: dict[tuple[int, int], dict[int, Call]] = {}
    for each in ranks:
        for call in each.records.calls:
            if not call.signature.is_pairwise:
                by_call.setdefault((call.member.key, call.sequence), {})[each.rank] = call
    if not by_call:
        return []
    every = (call for calls in by_call.values() for call in calls.values())
    key = max(every, key=lambda call: (call.member.size, call.entered_s)).member.key
    chosen = sorted(sequence for k, sequence in by_call if k == key)[-most:]
    return [_arrivals(by_call[key, sequence]) for sequence in chosen]


def _arrivals(calls: dict[int, Call]) -> Arrivals:
    first_s = min(call.entered_s for call in calls.values())
    came_s = {rank: call.entered_s - first_s for rank, call in sorted(calls.items())}
    return Arrivals(next(iter(calls.values())), came_s)
