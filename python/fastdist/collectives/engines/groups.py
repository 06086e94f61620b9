"""A hierarchy over one engine: groups of neighbouring ranks, and the groups' first ranks."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import final

from fastdist.collectives.engines.engine import Engine
from fastdist.collectives.engines.failure_board import Cause
from fastdist.collectives.engines.hierarchical import HierarchicalEngine
from fastdist.collectives.engines.layout import Layout
from fastdist.collectives.engines.place_links import PlaceLinks


def engine_in_groups(flat: Engine, width: int, timeout_s: float) -> Engine:
    """Arrange the ranks of an engine in groups of neighbours. Every rank of `flat` must call.

    Args:
        flat: the engine; must not be used afterwards.
        width: ranks per group; the last group may be smaller.
        timeout_s: seconds to wait for other ranks.
    """
    starts = range(0, flat.size, width)
    layout = Layout(tuple(tuple(range(i, min(i + width, flat.size))) for i in starts))
    inner = flat.subset(layout.places, timeout_s)
    assert inner is not None
    return HierarchicalEngine(layout, flat.rank, inner, GroupLinks(flat, layout, timeout_s))


@final
class GroupLinks(PlaceLinks):
    """Connections between groups by `flat`, the engine of all ranks. Every rank makes one."""

    def __init__(self, flat: Engine, layout: Layout, timeout_s: float) -> None:
        self._flat = flat
        self.outer = flat.subset([layout.leaders], timeout_s)

    def lane(self, peer: int, sends: bool) -> tuple[Engine, int]:
        """Return the flat engine."""
        del sends
        return self._flat, peer

    def subset(
        self, groups: Sequence[Sequence[int]], layouts: Sequence[Layout], timeout_s: float
    ) -> PlaceLinks | None:
        """Connect the groups by subsets of the flat engine."""
        flat = self._flat.subset(groups, timeout_s)
        for group, layout in zip(groups, layouts, strict=True):
            if flat is not None and self._flat.rank in group and len(layout.places) > 1:
                return GroupLinks(flat, layout, timeout_s)
        return None

    def blamed(self, layout: Layout) -> Sequence[tuple[int, ...]]:
        """Return each leader alone: the other ranks of its group may live."""
        return [(leader,) for leader in layout.leaders]

    def needing_all(self, inner: Engine, here: Sequence[int]) -> AbstractContextManager[None]:
        """Return a context that does nothing: a late rank may hide a death in another group."""
        return nullcontext()

    def post(self, cause: Cause) -> None:
        """Do nothing: the other ranks learn the cause from the engines."""

    def causes(self) -> dict[int, Cause]:
        """Return nothing: the engines report the causes."""
        return {}

    def close(self) -> None:
        """Close both engines."""
        if self.outer is not None:
            self.outer.close()
        self._flat.close()
