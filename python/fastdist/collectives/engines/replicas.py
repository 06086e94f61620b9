"""Threads of several processes as ranks of one communicator."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from fastdist.collectives.engines.engine import Engine
from fastdist.collectives.engines.failure_board import Cause
from fastdist.collectives.engines.hierarchical import HierarchicalEngine
from fastdist.collectives.engines.host import HostEngine
from fastdist.collectives.engines.layout import Layout
from fastdist.collectives.engines.place_links import PlaceLinks


def engines_over_threads(base: Engine, local: int, timeout_s: float) -> list[Engine]:
    """An engine for each of `local` threads of this process; every rank of `base` must call."""
    places = range(base.size)
    layout = Layout(tuple(tuple(range(p * local, (p + 1) * local)) for p in places))
    shared = SharedLinks(base, local, timeout_s)
    return [
        HierarchicalEngine(layout, rank, inner, ProcessLinks(shared, layout, rank))
        for rank, inner in zip(layout.places[base.rank], HostEngine.of_threads(local), strict=True)
    ]


class SharedLinks:
    """Between processes whose threads are ranks: what the threads of one process share.

    The processes are the ranks of `base`. Copies of it serve the leaders, the making of further
    groups, and each pair of threads, so that no two uses ever meet on one.

    Args:
        base: the processes; every one of them makes this object.
        width: the most threads that any of them has.
        timeout_s: seconds to wait for other processes.
    """

    def __init__(self, base: Engine, width: int, timeout_s: float) -> None:
        self.base = _copy_of(base, timeout_s)
        self.outer = _copy_of(base, timeout_s)
        self.lanes = {(i, j): _copy_of(base, timeout_s) for i in range(width) for j in range(width)}
        self._lock = threading.Lock()
        self._made: dict[int, Any] = {}
        self.causes: dict[int, Cause] = {}
        self._users = 0

    def once(self, number: int, make: Callable[[], Any]) -> Any:
        """What `make` gives: called by the first thread of this process that asks for `number`."""
        with self._lock:
            if number not in self._made:
                self._made[number] = make()
            return self._made[number]

    def enter(self) -> None:
        """A thread uses this."""
        with self._lock:
            self._users += 1

    def leave(self) -> None:
        """A thread does no longer; the last one closes what all share."""
        with self._lock:
            self._users -= 1
            if self._users:
                return
        for engine in (self.base, *self.lanes.values()):
            engine.close()


class ProcessLinks(PlaceLinks):
    """One thread's view of `SharedLinks`."""

    def __init__(self, shared: SharedLinks, layout: Layout, rank: int) -> None:
        self._shared = shared
        self._layout = layout
        self._rank = rank
        self._subsets = 0
        self._place, self._local = layout.place_of(rank)
        self.outer = shared.outer if self._local == 0 else None
        shared.enter()

    def lane(self, peer: int, sends: bool) -> tuple[Engine, int]:
        """The copy of this pair of threads."""
        place, local = self._layout.place_of(peer)
        pair = (self._local, local) if sends else (local, self._local)
        return self._shared.lanes[pair], place

    def subset(
        self, groups: Sequence[Sequence[int]], layouts: Sequence[Layout], timeout_s: float
    ) -> PlaceLinks | None:
        """Further copies, of the processes that a group is in; made once per process."""
        self._subsets += 1

        def make() -> list[SharedLinks | None]:
            made: list[SharedLinks | None] = []
            for group, layout in zip(groups, layouts, strict=True):
                processes = sorted({self._layout.place_of(rank)[0] for rank in group})
                if len(processes) == 1:
                    made.append(None)
                    continue
                base = self._shared.base.subset([processes], timeout_s)
                made.append(None if base is None else SharedLinks(base, layout.width, timeout_s))
            return made

        made = self._shared.once(self._subsets, make)
        for group, layout, shared in zip(groups, layouts, made, strict=True):
            if shared is not None and self._rank in group:
                return ProcessLinks(shared, layout, list(group).index(self._rank))
        return None

    def blamed(self, layout: Layout) -> Sequence[tuple[int, ...]]:
        """All threads of the process."""
        return layout.places

    def post(self, cause: Cause) -> None:
        """For the threads of this process; the others learn it from `outer`."""
        self._shared.causes.setdefault(self._rank, cause)

    def causes(self) -> dict[int, Cause]:
        """Of the threads of this process."""
        return {r: cause for r, cause in list(self._shared.causes.items()) if r != self._rank}

    def close(self) -> None:
        """Close the leaders' copy, and with the last thread the rest."""
        if self.outer is not None:
            self.outer.close()
        self._shared.leave()


def _copy_of(base: Engine, timeout_s: float) -> Engine:
    copy = base.subset([list(range(base.size))], timeout_s)
    assert copy is not None
    return copy
