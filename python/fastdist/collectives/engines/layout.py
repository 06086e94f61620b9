"""The layout of ranks on machines, or in groups of neighbouring ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Layout:
    """The ranks of each place. The first rank of a place is its leader.

    Attributes:
        places: the ranks of each place. Each rank is in exactly one place; the ranks of a place
            need not be contiguous.
    """

    places: tuple[tuple[int, ...], ...]

    @property
    def size(self) -> int:
        """The number of ranks in all places."""
        return sum(map(len, self.places))

    def place_of(self, rank: int) -> tuple[int, int]:
        """Return the place of a rank and the rank's number within that place."""
        for place, ranks in enumerate(self.places):
            if rank in ranks:
                return place, ranks.index(rank)
        raise ValueError(f"rank must be from 0 to {self.size - 1}, got {rank}")

    def subset(self, group: Sequence[int]) -> Layout:
        """Return the layout of a group of ranks, numbered in the group's order."""
        here: dict[int, list[int]] = {}
        for number, rank in enumerate(group):
            here.setdefault(self.place_of(rank)[0], []).append(number)
        return Layout(tuple(tuple(numbers) for _, numbers in sorted(here.items())))
