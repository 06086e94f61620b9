"""Where ranks are, and what connects the places: the half of a hierarchy that is not within one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from fastdist.collectives.engines.departures import Cause
from fastdist.collectives.engines.engine import Engine


@dataclass(frozen=True, slots=True)
class Layout:
    """Which ranks are where. A place is a machine or a process; its first rank is its leader.

    Attributes:
        places: the ranks of each place. Every rank is in one; they need not be contiguous.
    """

    places: tuple[tuple[int, ...], ...]

    @property
    def size(self) -> int:
        """Ranks in all places."""
        return sum(map(len, self.places))

    @property
    def width(self) -> int:
        """Ranks of the largest place."""
        return max(map(len, self.places))

    @property
    def leaders(self) -> tuple[int, ...]:
        """The first rank of each place."""
        return tuple(ranks[0] for ranks in self.places)

    def place_of(self, rank: int) -> tuple[int, int]:
        """The place that a rank is in, and its number there."""
        for place, ranks in enumerate(self.places):
            if rank in ranks:
                return place, ranks.index(rank)
        raise ValueError(f"rank {rank} is not one of {self.size}")

    def subset(self, group: Sequence[int]) -> Layout:
        """The layout of some ranks, numbered as they come in `group`."""
        here: dict[int, list[int]] = {}
        for number, rank in enumerate(group):
            here.setdefault(self.place_of(rank)[0], []).append(number)
        return Layout(tuple(tuple(numbers) for _, numbers in sorted(here.items())))


class Links(ABC):
    """One rank's connections to other places.

    Attributes:
        outer: the engine between leaders; None on other ranks.
    """

    outer: Engine | None

    @abstractmethod
    def lane(self, peer: int, sends: bool) -> tuple[Engine, int]:
        """What carries a send to or a recv from a rank of another place, and its number there."""

    @abstractmethod
    def subset(
        self, groups: Sequence[Sequence[int]], layouts: Sequence[Layout], timeout_s: float
    ) -> Links | None:
        """Links for each group; None on ranks whose group is in one place, or that have none."""

    @abstractmethod
    def blamed(self, layout: Layout) -> Sequence[tuple[int, ...]]:
        """Of each rank of `outer`, the ranks that are gone when it is."""

    @abstractmethod
    def post(self, cause: Cause) -> None:
        """Tell the other ranks why this one leaves."""

    @abstractmethod
    def causes(self) -> dict[int, Cause]:
        """Why other ranks left."""

    @abstractmethod
    def close(self) -> None:
        """Let go of everything."""
