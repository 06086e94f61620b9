"""Connections between machines, by Gloo."""

from __future__ import annotations

import contextlib
import queue
import time
from collections.abc import Iterator, Sequence
from typing import Any, final

from fastdist.collectives.engines.c10d import c10d
from fastdist.collectives.engines.engine import Engine
from fastdist.collectives.engines.failure_board import (
    Answer,
    Cause,
    FailureBoard,
    StoreLostError,
    died,
)
from fastdist.collectives.engines.gloo import GlooEngine
from fastdist.collectives.engines.gloo_group import FAILURE_POLL_S, error_from
from fastdist.collectives.engines.host import HostEngine
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
        self._reader = _BoardReader(self._board)
        self._noticed: Cause | None = None  # a failure on this machine, while leaders wait
        self.outer: GlooEngine | None = None
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

    @contextlib.contextmanager
    def needing_all(self, inner: Engine, here: Sequence[int]) -> Iterator[None]:
        """A context manager: waits in this machine read the board, and leaders look for deaths.

        A rank that waits for a late rank would not notice that a rank elsewhere has died.
        """
        assert isinstance(inner, HostEngine)
        inner.watch(self._reader.require_no_cause)
        if self.outer is not None:
            self.outer.watch(lambda: self._require_alive(inner, here))
        try:
            yield
        finally:
            inner.watch(None)
            if self.outer is not None:
                self.outer.watch(None)

    def _require_alive(self, inner: HostEngine, here: Sequence[int]) -> None:
        dead = inner.dead_rank()
        if dead is None or self._noticed is not None:
            return
        rank = here[dead]
        posted = self.causes()  # of a rank that failed, posted why, and ended
        self._noticed = posted[min(posted)] if posted else died(rank)
        self.post(self._noticed)  # before the other leaders lose the connection to this one
        raise self._noticed.to_error()

    def post(self, cause: Cause) -> None:
        """Post the cause in the store."""
        self._board.post_cause(cause)

    def causes(self) -> dict[int, Cause]:
        """Read the causes from the store; return none of others if the store is lost."""
        own = {} if self._noticed is None else {self._flat.rank: self._noticed}
        try:
            return own | self._board.causes()
        except StoreLostError:
            return own

    def close(self) -> None:
        """Close both Gloo groups."""
        if self.outer is not None:
            self.outer.close()
        self._flat.close()


class _BoardReader:
    """Reads a board while a call waits, at most twice a second, without waiting for the answer."""

    def __init__(self, board: FailureBoard) -> None:
        self._board = board
        self._asked_at = 0.0
        self._answer: Answer[dict[int, Cause]] | None = None

    def require_no_cause(self) -> None:
        """Raise if a rank has posted why it left."""
        if self._answer is None:
            if time.monotonic() - self._asked_at < FAILURE_POLL_S:
                return
            self._asked_at = time.monotonic()
            self._answer = self._board.begin_causes()
        with contextlib.suppress(queue.Empty):
            answer, self._answer = self._answer.get_nowait(), None
            with contextlib.suppress(StoreLostError):
                causes = answer()
                if causes:
                    raise error_from(causes)
