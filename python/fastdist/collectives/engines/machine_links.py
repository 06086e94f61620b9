"""Connections between machines, by Gloo."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

from fastdist.collectives.engines.c10d import c10d
from fastdist.collectives.engines.engine import Engine
from fastdist.collectives.engines.failure_board import Cause, FailureBoard, StoreLostError
from fastdist.collectives.engines.gloo import GlooEngine
from fastdist.collectives.engines.layout import Layout
from fastdist.collectives.engines.place_links import PlaceLinks


@final
class MachineLinks(PlaceLinks):
    """A Gloo group of the machines' leaders, and Gloo lanes between any two ranks.

    Args:
        flat: the engine of all ranks; provides the lanes.
        layout: the ranks of each machine.
        store: torch's store, with a prefix that only this communicator uses.
        timeout_s: seconds to wait for other leaders to connect.
    """

    def __init__(self, flat: GlooEngine, layout: Layout, store: Any, timeout_s: float) -> None:
        self._flat = flat
        self._layout = layout
        self._store = store
        self._subsets = 0
        self._board = FailureBoard(c10d().PrefixStore("links", store), flat.rank, flat.size)
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
        """Return the engine of all ranks."""
        return self._flat, peer

    def subset(
        self, groups: Sequence[Sequence[int]], layouts: Sequence[Layout], timeout_s: float
    ) -> PlaceLinks | None:
        """Connect the groups by further Gloo groups from the same store."""
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
        """Return each leader alone: the other ranks of its machine may live."""
        return [(rank,) for rank in layout.leaders]

    def post(self, cause: Cause) -> None:
        """Post the cause in the store."""
        self._board.post_cause(cause)

    def causes(self) -> dict[int, Cause]:
        """Read the causes from the store; return none if the store is lost."""
        try:
            return self._board.causes()
        except StoreLostError:
            return {}

    def close(self) -> None:
        """Close both Gloo groups."""
        if self.outer is not None:
            self.outer.close()
        self._flat.close()
