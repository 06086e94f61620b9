"""Two engines combined: `inner` between the ranks of a place, `outer` between the places' leaders.

A place is a machine, whose ranks share memory, or a group of neighbouring ranks. Its leader is its
first rank. Reductions go up (inner reduce), across (between leaders) and down (inner broadcast).
Bytes cross between places once, for any number of ranks per place:

| collective | inner | outer | inner |
|---|---|---|---|
| comparison of signatures, with arrays up to 512 B; barrier | all_gather | all_gather | broadcast |
| all_reduce | reduce | all_reduce | broadcast |
| reduce | reduce | reduce | to the root |
| broadcast | broadcast, at the root's | broadcast | broadcast, elsewhere |
| all_gather | gather | all_gather | broadcast |
| gather | gather | gather | to the root |
| scatter | from the root | scatter | scatter |
| reduce_scatter | reduce | reduce_scatter | scatter |
| all_to_all | all_to_all, to the leader | all_to_all | all_to_all, from the leader |

A reduction goes through the ranks of each place in order, then through the places in order. Its
bits are the same on every rank and in every run, but differ from those of a flat reduction in rank
order. 16-bit and 8-bit floats stay float32 until the end, and a mean divides once.

If a rank is missing, the leader of its place tells the other leaders during the comparison of
signatures, and they tell their ranks, so that all ranks raise the same error. Each stage therefore
waits a little longer than the stage before it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, final

import numpy as np

from fastdist.collectives.engines.checked import CheckedEngine, Run
from fastdist.collectives.engines.engine import Bytes, Calls, Engine
from fastdist.collectives.engines.failure_board import Cause
from fastdist.collectives.engines.layout import Layout
from fastdist.collectives.engines.place_links import PlaceLinks
from fastdist.collectives.engines.reduction import (
    accumulates_wide,
    divide,
    narrow,
    reduce_in_order,
    widen,
)
from fastdist.collectives.engines.views import View
from fastdist.errors import FastdistError

_GRACE_S = 0.6
_CAUSE_BYTES = 512


@final
class HierarchicalEngine(CheckedEngine):
    """Ranks in several places.

    Args:
        layout: the ranks of each place.
        rank: this rank.
        inner: the engine between the ranks of this place, in the layout's order.
        links: the connections between the places.
    """

    def __init__(self, layout: Layout, rank: int, inner: Engine, links: PlaceLinks) -> None:
        super().__init__(rank, layout.size)
        self._layout = layout
        self._place, self._local = layout.place_of(rank)
        self._inner_engine = inner
        self._inner = inner.trusted_calls()
        self._links = links
        # With one rank per place, no leader waits for ranks of its place.
        self._grace_s = _GRACE_S if layout.width > 1 else 0.0
        self._outer: Calls = {}
        if links.outer is not None:
            self._outer = links.outer.trusted_calls()

    def empty(self, nbytes: int) -> Bytes:
        """Allocate memory that the ranks of this place share."""
        return self._inner_engine.empty(nbytes)

    def subset(self, groups: Sequence[Sequence[int]], timeout_s: float) -> Engine | None:
        """Make an inner engine for a group within one place, else a hierarchical engine."""
        layouts = [self._layout.subset(group) for group in groups]
        local = [
            [self._layout.place_of(rank)[1] for rank in group if self._is_here(rank)]
            for group in groups
        ]
        # The ranks of each place are in the order of the new layout.
        inner = self._inner_engine.subset([ranks for ranks in local if ranks], timeout_s)
        links = self._links.subset(groups, layouts, timeout_s)
        for group, layout in zip(groups, layouts, strict=True):
            if self.rank in group:
                assert inner is not None
                if len(layout.places) == 1:
                    return inner
                assert links is not None
                return HierarchicalEngine(layout, list(group).index(self.rank), inner, links)
        return None

    # --- comparison -----------------------------------------------------------------------------

    def _all_gather_records(self, record: bytes, step_s: float) -> list[bytes]:
        """Gather up, across and down; a cause precedes the records of a place that lost a rank."""
        length, width = len(record), self._layout.width
        block = _CAUSE_BYTES + width * length
        everyone = np.zeros(len(self._layout.places) * block, np.uint8)
        with self._links.needing_all(self._inner_engine, self._layout.places[self._place]):
            if not self._outer:
                self._call_inner("all_gather", _bytes_of(record), self._blank(length), step_s)
                self._call_inner("broadcast", everyone, 0, None, step_s + 2 * self._grace_s)
            else:
                self._share_as_leader(record, everyone.reshape(-1, block), step_s)
        records = []
        for row in everyone.reshape(-1, block):
            text = row[:_CAUSE_BYTES].tobytes().rstrip(b"\0")
            if text:
                raise Cause.unpack(text).to_error()
        rows = everyone.reshape(-1, block)[:, _CAUSE_BYTES:].reshape(-1, width, length)
        for rank in range(self.size):
            place, local = self._layout.place_of(rank)
            records.append(rows[place, local].tobytes())
        return records

    def _share_as_leader(self, record: bytes, everyone: Bytes, step_s: float) -> None:
        block = everyone.shape[1]
        own = np.zeros(block, np.uint8)
        here = self._blank(len(record))
        lost_here: FastdistError | None = None
        try:
            self._call_inner("all_gather", _bytes_of(record), here, step_s)
            own[_CAUSE_BYTES : _CAUSE_BYTES + here.nbytes] = here
        except FastdistError as error:
            lost_here = error
            _write_cause(own, error)
        try:
            self._call_outer("all_gather", own, everyone.reshape(-1), step_s + self._grace_s)
        except FastdistError as error:
            if lost_here is None:
                everyone[:] = 0
                _write_cause(everyone[self._place], error)
        if lost_here is not None:
            raise lost_here
        self._call_inner("broadcast", everyone.reshape(-1), 0, None, step_s + 2 * self._grace_s)

    def _blank(self, length: int) -> Bytes:
        return np.zeros(self._inner_engine.size * length, np.uint8)

    def _call_inner(self, op: str, *args: Any) -> None:
        """Run a collective within this place; translate ranks in its errors."""
        try:
            self._inner[op](*args, False)
        except FastdistError as error:
            here = [(rank,) for rank in self._layout.places[self._place]]
            raise self._cause_of(error, here).to_error() from None

    def _call_outer(self, op: str, *args: Any) -> None:
        """Run a collective between the leaders; translate ranks in its errors."""
        try:
            self._outer[op](*args, False)
        except FastdistError as error:
            raise self._cause_of(error, self._links.blamed(self._layout)).to_error() from None

    def _cause_of(self, error: FastdistError, numbers: Sequence[tuple[int, ...]]) -> Cause:
        posted = self._links.causes()
        if posted:
            return posted[min(posted)]
        cause = Cause.from_error(error)
        ranks: list[int] = []
        for rank in cause.ranks:
            known = numbers[rank] if rank < len(numbers) else ()
            closed = "has closed" in cause.text  # only the leader left; its place may live
            ranks += known[:1] if closed else known
        names = ", ".join(map(str, ranks)) or "of another place"
        what = "did not arrive in time" if cause.is_timeout else _how_lost(cause.text)
        return Cause(cause.is_timeout, tuple(ranks), f"rank {names} {what}")

    def _disconnect(self, error: FastdistError | None) -> None:
        if error is not None:
            self._links.post(Cause.from_error(error))
        self._inner_engine.close()
        self._links.close()

    # --- reductions -----------------------------------------------------------------------------

    def _all_reduce(
        self, ins: list[View], outs: list[View], op: str, compress: str | None, step_s: float
    ) -> None:
        totals = self._reduce_here(ins, outs, op, step_s)
        if self._outer:
            flats = [view.flat for view in totals]
            self._call_outer("all_reduce", flats, _summed(op), None, compress, step_s)
            self._finish_totals(totals, outs, op)
        self._call_inner("broadcast", [v.flat for v in outs], 0, None, step_s + 2 * self._grace_s)

    def _reduce_here(self, ins: list[View], into: list[View], op: str, step_s: float) -> list[View]:
        """Reduce within the place; the leader gets the totals, in `into` or in wider memory."""
        sources: list[View] = []
        totals: list[View] = []
        for view, target in zip(ins, into or ins, strict=True):
            wide = accumulates_wide(op, view.dtype)
            sources.append(View(widen(view), "float32") if wide else view)
            totals.append(sources[-1] if wide else target)
        in_place = all(a.address == b.address for a, b in zip(sources, totals, strict=True))
        out = None if in_place or not self._outer else [view.flat for view in totals]
        self._call_inner("reduce", [view.flat for view in sources], _summed(op), 0, out, step_s)
        return totals

    def _reduce_payloads(self, parts: list[View], out: View, op: str) -> None:
        wide = accumulates_wide(op, out.dtype)
        if wide:
            parts = [View(widen(part), "float32") for part in parts]
        here = []
        for ranks in self._layout.places:
            here.append(parts[ranks[0]])
            reduce_in_order([parts[rank] for rank in ranks], _summed(op), here[-1])
        reduce_in_order(here, _summed(op), here[0])
        self._finish_totals(here[:1], [out], op)
        if not wide:
            out.flat[:] = here[0].flat

    def _finish_totals(self, totals: list[View], outs: list[View], op: str) -> None:
        """Divide for a mean, and round small floats; on leaders only."""
        for total, out in zip(totals, outs, strict=True):
            if op == "mean":
                divide(total.flat, self.size)
            if accumulates_wide(op, out.dtype):
                narrow(total.flat, out)

    def _reduce(self, ins: list[View], outs: list[View], op: str, root: int, step_s: float) -> None:
        place, _ = self._layout.place_of(root)
        results: list[View] = []
        pool = np.empty(0, np.uint8)
        if self._outer:
            pool, results = _pool(ins)
        totals = self._reduce_here(ins, results, op, step_s)
        if self._outer:
            self._call_outer("reduce", [v.flat for v in totals], _summed(op), place, None, step_s)
        if place != self._place:
            return
        if self._outer:
            self._finish_totals(totals, results, op)
        nbytes = _pool_bytes(ins)
        pool = self._move_within_place(pool, nbytes, 0, root, step_s)
        if self.rank == root:
            for view, out in zip(_pool_views(ins, pool), outs, strict=True):
                out.memory[:] = view.memory

    def _reduce_scatter(self, source: View, target: View, op: str, step_s: float) -> None:
        rows = target.count
        width = self._layout.width
        wide = accumulates_wide(op, source.dtype)
        total = source if not self._outer else source.new(source.count)
        totals = self._reduce_here([source], [total], op, step_s)
        part = target.new(width * rows)
        if self._outer:
            summed = totals[0]
            by_place = summed.new(len(self._layout.places) * width * rows)
            for at, rank in self._padded():
                by_place.flat[at * rows : (at + 1) * rows] = summed.flat[
                    rank * rows : (rank + 1) * rows
                ]
            for at in self._padding():
                by_place.flat[at * rows : (at + 1) * rows] = 0
            mine = summed.new(width * rows)
            self._call_outer("reduce_scatter", by_place.flat, _summed(op), mine.flat, step_s)
            if wide:
                self._finish_totals([mine], [part], op)
            else:
                self._finish_totals([mine], [mine], op)
                part = mine
        here = part.part(0, self._inner_engine.size * rows)
        self._call_inner(
            "scatter",
            here.flat if self._outer else None,
            0,
            target.flat,
            step_s + 2 * self._grace_s,
        )

    # --- movement -------------------------------------------------------------------------------

    def _broadcast(self, arrays: list[View], root: int, step_s: float) -> None:
        place, local = self._layout.place_of(root)
        flats = [view.flat for view in arrays]
        if place == self._place:
            self._call_inner("broadcast", flats, local, None, step_s)
        if self._outer:
            self._call_outer("broadcast", flats, place, None, step_s)
        if place != self._place:
            self._call_inner("broadcast", flats, 0, None, step_s + 2 * self._grace_s)

    def _all_gather(self, source: View, target: View, step_s: float) -> None:
        block = self._gather_here(source.memory, step_s)
        if self._outer:
            everyone = np.empty(len(self._layout.places) * block.nbytes, np.uint8)
            self._call_outer("all_gather", block, everyone, step_s)
            self._in_rank_order(everyone, target.memory)
        self._call_inner("broadcast", target.memory, 0, None, step_s + 2 * self._grace_s)

    def _gather(self, source: View, target: View | None, root: int, step_s: float) -> None:
        place, _ = self._layout.place_of(root)
        block = self._gather_here(source.memory, step_s)
        total = self.size * source.nbytes
        joined = np.empty(0, np.uint8)
        if self._outer:
            everyone = None
            if place == self._place:
                everyone = np.empty(len(self._layout.places) * block.nbytes, np.uint8)
            self._call_outer("gather", block, place, everyone, step_s)
            if everyone is not None:
                joined = np.empty(total, np.uint8)
                self._in_rank_order(everyone, joined)
        if place == self._place:
            joined = self._move_within_place(joined, total, 0, root, step_s + 2 * self._grace_s)
            if target is not None:
                target.memory[:] = joined

    def _scatter(self, source: View | None, target: View, root: int, step_s: float) -> None:
        place, local = self._layout.place_of(root)
        length = target.nbytes
        whole = np.empty(0, np.uint8) if source is None else source.memory
        if place == self._place:
            whole = self._move_within_place(whole, self.size * length, local, self._first(), step_s)
        part = np.empty(self._layout.width * length, np.uint8)
        if self._outer:
            by_place = None
            if place == self._place:
                by_place = np.empty(len(self._layout.places) * part.nbytes, np.uint8)
                for at, rank in self._padded():
                    by_place[at * length : (at + 1) * length] = whole[
                        rank * length : (rank + 1) * length
                    ]
            self._call_outer("scatter", by_place, place, part, step_s)
        here = part[: self._inner_engine.size * length] if self._outer else None
        self._call_inner("scatter", here, 0, target.memory, step_s + 2 * self._grace_s)

    def _all_to_all(
        self, source: View, target: View, table: list[list[int]], step_s: float
    ) -> None:
        item = source.flat.itemsize
        places, here = self._layout.places, self._layout.places[self._place]
        nbytes = [[count * item for count in row] for row in table]
        # Up: the leader gets the whole array of each rank.
        n = len(here)
        up = [[sum(nbytes[rank]) if j == 0 else 0 for j in range(n)] for rank in here]
        gathered = np.empty(sum(map(sum, up)) if self._outer else 0, np.uint8)
        self._call_inner("all_to_all", source.memory, gathered, _flatten(up), step_s)
        arrived = gathered[:0]
        if self._outer:
            arrived = self._exchange_between_leaders(gathered, nbytes, step_s)
        # Down: each rank gets its parts from all ranks, in rank order.
        down = [
            [sum(row[rank] for row in nbytes) if i == 0 else 0 for rank in here] for i in range(n)
        ]
        if self._outer:
            pieces, at = {}, 0
            for place in places:
                for i in place:
                    for j in here:
                        pieces[i, j] = arrived[at : at + nbytes[i][j]]
                        at += nbytes[i][j]
            arrived = _join(pieces[i, j] for j in here for i in range(self.size))
        self._call_inner(
            "all_to_all", arrived, target.memory, _flatten(down), step_s + 2 * self._grace_s
        )

    def _exchange_between_leaders(
        self, gathered: Bytes, nbytes: list[list[int]], step_s: float
    ) -> Bytes:
        """Exchange the parts from each rank of this place to each rank of other places."""
        places, here = self._layout.places, self._layout.places[self._place]
        pieces, at = {}, 0
        for i in here:
            for j in range(self.size):
                pieces[i, j] = gathered[at : at + nbytes[i][j]]
                at += nbytes[i][j]
        outgoing = _join(pieces[i, j] for place in places for i in here for j in place)
        between = [[sum(nbytes[i][j] for i in a for j in b) for b in places] for a in places]
        incoming = np.empty(sum(row[self._place] for row in between), np.uint8)
        self._call_outer("all_to_all", outgoing, incoming, _flatten(between), step_s)
        return incoming

    def _gather_here(self, memory: Bytes, step_s: float) -> Bytes:
        """Gather the bytes of this place on its leader, padded to the width of the largest place.

        Other ranks get an empty array.
        """
        block = np.empty(self._layout.width * memory.nbytes if self._outer else 0, np.uint8)
        out = block[: self._inner_engine.size * memory.nbytes] if self._outer else None
        self._call_inner("gather", memory, 0, out, step_s)
        return block

    def _move_within_place(
        self, memory: Bytes, nbytes: int, src: int, rank: int, step_s: float
    ) -> Bytes:
        """Send from number `src` of this place to the global `rank`. Every rank here must call."""
        _, dst = self._layout.place_of(rank)
        if src == dst:
            return memory
        n = self._inner_engine.size
        counts = [nbytes if (i, j) == (src, dst) else 0 for i in range(n) for j in range(n)]
        out = np.empty(nbytes if self._local == dst else 0, np.uint8)
        given = memory if self._local == src else memory[:0]
        self._call_inner("all_to_all", given, out, counts, step_s + 2 * self._grace_s)
        return out

    def _first(self) -> int:
        return self._layout.places[self._place][0]

    def _padded(self) -> list[tuple[int, int]]:
        """Return pairs of row and rank, if every place has `width` rows."""
        width = self._layout.width
        return [
            (place * width + local, rank)
            for place, ranks in enumerate(self._layout.places)
            for local, rank in enumerate(ranks)
        ]

    def _padding(self) -> list[int]:
        used = {at for at, _ in self._padded()}
        return [at for at in range(len(self._layout.places) * self._layout.width) if at not in used]

    def _in_rank_order(self, padded: Bytes, joined: Bytes) -> None:
        length = joined.nbytes // self.size
        for at, rank in self._padded():
            joined[rank * length : (rank + 1) * length] = padded[at * length : (at + 1) * length]

    # --- send and recv --------------------------------------------------------------------------

    def _call_send(self, run: Run, array: Any, dst: int, timeout_s: float, async_op: bool) -> Any:
        return self._transfer("send", array, dst, timeout_s, async_op)

    def _call_recv(self, run: Run, array: Any, src: int, timeout_s: float, async_op: bool) -> Any:
        return self._transfer("recv", array, src, timeout_s, async_op)

    def _transfer(self, op: str, array: Any, peer: int, timeout_s: float, async_op: bool) -> Any:
        """Transfer by the engine that connects the two ranks, with its own queue and comparison."""
        peer = self._peer(peer, op)
        self._check_usable()
        if self._is_here(peer):
            call: Callable[..., Any] = self._inner_engine.calls()[op]
            number = self._layout.place_of(peer)[1]
        else:
            engine, number = self._links.lane(peer, op == "send")
            call = engine.calls()[op]
        return call(array, number, timeout_s, async_op)

    def _is_here(self, rank: int) -> bool:
        return self._layout.place_of(rank)[0] == self._place


def _bytes_of(record: bytes) -> Bytes:
    return np.frombuffer(record, np.uint8)


def _summed(op: str) -> str:
    return "sum" if op == "mean" else op


def _how_lost(text: str) -> str:
    return "has closed the communicator" if "has closed" in text else "has died or left"


def _write_cause(block: Bytes, error: FastdistError) -> None:
    cause = Cause.from_error(error)
    data = cause.pack()
    if len(data) > _CAUSE_BYTES:
        data = Cause(cause.is_timeout, cause.ranks[:16], cause.text[:100]).pack()
    block[: len(data)] = np.frombuffer(data, np.uint8)


def _flatten(table: Sequence[Sequence[int]]) -> list[int]:
    return [count for row in table for count in row]


def _join(pieces: Any) -> Bytes:
    found = list(pieces)
    return np.concatenate(found) if found else np.empty(0, np.uint8)


_ALIGNMENT = 16


def _offsets(views: Sequence[View]) -> list[int]:
    offsets, at = [], 0
    for view in views:
        offsets.append(at)
        at += -(-view.nbytes // _ALIGNMENT) * _ALIGNMENT
    return [*offsets, at]


def _pool_bytes(views: Sequence[View]) -> int:
    return _offsets(views)[-1]


def _pool_views(views: Sequence[View], pool: Bytes) -> list[View]:
    return [
        View(view.like(pool[at : at + view.nbytes]), view.dtype)
        for view, at in zip(views, _offsets(views), strict=False)
    ]


def _pool(views: Sequence[View]) -> tuple[Bytes, list[View]]:
    """Allocate one block of memory for copies of all arrays; return it and the copies' views."""
    pool = np.empty(_pool_bytes(views), np.uint8)
    return pool, _pool_views(views, pool)
