"""Machines, connected by Gloo."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastdist.collectives.engines.c10d import c10d
from fastdist.collectives.engines.departures import Cause, Departures, StoreLostError
from fastdist.collectives.engines.engine import Engine
from fastdist.collectives.engines.gloo import GlooEngine
from fastdist.collectives.engines.links import Layout, Links


class MachineLinks(Links):
    """Machines, by Gloo: a group of the leaders, and lanes between any two ranks.

    Args:
        flat: all ranks; for its lanes.
        layout: which are where.
        store: torch's, with a prefix of this communicator.
        timeout_s: seconds to wait for other leaders to connect.
    """

    def __init__(self, flat: GlooEngine, layout: Layout, store: Any, timeout_s: float) -> None:
        self._flat = flat
        self._layout = layout
        self._store = store
        self._subsets = 0
        self._departures = Departures(c10d().PrefixStore("links", store), flat.rank, flat.size)
        self.outer = None
        if flat.rank in layout.leaders:
            self.outer = GlooEngine(
                c10d().PrefixStore("leaders", store),
                layout.leaders.index(flat.rank),
                len(layout.leaders),
                flat.address,
                timeout_s,
            )

    def lane(self, peer: int, sends: bool) -> tuple[Engine, int]:
        """Of the group of all ranks."""
        return self._flat, peer

    def subset(
        self, groups: Sequence[Sequence[int]], layouts: Sequence[Layout], timeout_s: float
    ) -> Links | None:
        """Further groups from the same store."""
        self._subsets += 1
        spread = [
            (group, layout)
            for group, layout in zip(groups, layouts, strict=True)
            if len(layout.places) > 1
        ]
        flat = self._flat.subset([group for group, _ in spread], timeout_s)
        for group, layout in spread:
            if flat is not None and self._flat.rank in group:
                name = f"subset{self._subsets}/{'-'.join(map(str, group))}"
                return MachineLinks(flat, layout, c10d().PrefixStore(name, self._store), timeout_s)
        return None

    def blamed(self, layout: Layout) -> Sequence[tuple[int, ...]]:
        """The leader alone: the others of its machine may live."""
        return [(rank,) for rank in layout.leaders]

    def post(self, cause: Cause) -> None:
        """In the store."""
        self._departures.post(cause)

    def causes(self) -> dict[int, Cause]:
        """From the store; nothing where that is gone."""
        try:
            return self._departures.causes()
        except StoreLostError:
            return {}

    def close(self) -> None:
        """Close both groups."""
        if self.outer is not None:
            self.outer.close()
        self._flat.close()
