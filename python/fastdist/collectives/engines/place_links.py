"""Connections between the places of a hierarchy."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager

from fastdist.collectives.engines.engine import Engine
from fastdist.collectives.engines.failure_board import Cause
from fastdist.collectives.engines.layout import Layout


class PlaceLinks(ABC):
    """One rank's connections to other places.

    Attributes:
        outer: the engine between the leaders; None on other ranks.
    """

    outer: Engine | None

    @abstractmethod
    def lane(self, peer: int, sends: bool) -> tuple[Engine, int]:
        """Return the engine for a send to or a recv from a rank of another place.

        Args:
            peer: the other rank.
            sends: True for send, False for recv.

        Returns:
            The engine, and the peer's rank in it.
        """

    @abstractmethod
    def subset(
        self, groups: Sequence[Sequence[int]], layouts: Sequence[Layout], timeout_s: float
    ) -> PlaceLinks | None:
        """Connect each group of ranks that spans several places. Every rank must call.

        Args:
            groups: disjoint groups of ranks.
            layouts: the layout of each group.
            timeout_s: seconds to wait for other ranks.

        Returns:
            The links of this rank's group, or None if this rank is in no group or its group is
            within one place.
        """

    @abstractmethod
    def blamed(self, layout: Layout) -> Sequence[tuple[int, ...]]:
        """Return, for each rank of `outer`, the ranks to report as lost when it is lost."""

    @abstractmethod
    def needing_all(self, inner: Engine, here: Sequence[int]) -> AbstractContextManager[None]:
        """Return a context in which no rank may die: waits of one place notice deaths in another.

        Args:
            inner: the engine between the ranks of this place.
            here: the ranks of this place.
        """

    @abstractmethod
    def post(self, cause: Cause) -> None:
        """Tell the other ranks why this rank leaves."""

    @abstractmethod
    def causes(self) -> dict[int, Cause]:
        """Return why ranks left, by the rank that noticed."""

    @abstractmethod
    def close(self) -> None:
        """Close all connections."""
