"""An engine as a hierarchy: neighbouring ranks first, then one of each group with the others."""

from __future__ import annotations

from collections.abc import Sequence

from fastdist.collectives.engines.departures import Cause
from fastdist.collectives.engines.engine import Engine
from fastdist.collectives.engines.hierarchical import HierarchicalEngine
from fastdist.collectives.engines.links import Layout, Links


def engine_in_groups(flat: Engine, width: int, timeout_s: float) -> Engine:
    """The ranks of `flat`, which must not be used any more, in groups of `width` neighbours.

    Every rank of `flat` must call.
    """
    starts = range(0, flat.size, width)
    layout = Layout(tuple(tuple(range(i, min(i + width, flat.size))) for i in starts))
    inner = flat.subset(layout.places, timeout_s)
    assert inner is not None
    return HierarchicalEngine(layout, flat.rank, inner, GroupLinks(flat, layout, timeout_s))


class GroupLinks(Links):
    """Between the groups, all of whose ranks `flat` connects. Every rank makes it."""

    def __init__(self, flat: Engine, layout: Layout, timeout_s: float) -> None:
        self._flat = flat
        self.outer = flat.subset([layout.leaders], timeout_s)

    def lane(self, peer: int, sends: bool) -> tuple[Engine, int]:
        """The flat engine."""
        del sends
        return self._flat, peer

    def subset(
        self, groups: Sequence[Sequence[int]], layouts: Sequence[Layout], timeout_s: float
    ) -> Links | None:
        """Over flat engines of the groups."""
        flat = self._flat.subset(groups, timeout_s)
        for group, layout in zip(groups, layouts, strict=True):
            if flat is not None and self._flat.rank in group and len(layout.places) > 1:
                return GroupLinks(flat, layout, timeout_s)
        return None

    def blamed(self, layout: Layout) -> Sequence[tuple[int, ...]]:
        """The leader alone: others of its group may live."""
        return [(leader,) for leader in layout.leaders]

    def post(self, cause: Cause) -> None:
        """The others learn it from the engines."""

    def causes(self) -> dict[int, Cause]:
        """None that the engines do not tell."""
        return {}

    def close(self) -> None:
        """Leave both engines."""
        if self.outer is not None:
            self.outer.close()
        self._flat.close()
