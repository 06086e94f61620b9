"""Random programs of calls, several of which are under way at the same time, next to numpy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from fastdist import Communicator
from ranks import ProcessRanks
from test_net import MachineThreads

STEPS = 1000
DTYPES = ("float32", "float64", "float16", "int8", "uint8", "int16", "int32", "int64")
OPS = {"sum": np.add, "prod": np.multiply, "min": np.minimum, "max": np.maximum}
Array = np.ndarray[Any, Any]
Check = Callable[[], object]  # waits for a call, and compares its result


class Program:
    """One rank's side of a program: what all ranks must agree on is drawn from `common`."""

    def __init__(self, comm: Communicator, seed: int) -> None:
        self.comm = comm
        self.common = np.random.default_rng(seed)
        self.own = np.random.default_rng([seed, comm.rank])
        self.calls = [
            *(self.all_reduce, self.all_reduce_list, self.reduce, self.broadcast),
            *(self.all_gather, self.gather, self.scatter, self.reduce_scatter, self.all_to_all),
            *(self.messages, self.messages, self.group, self.from_any, self.scan),
        ]

    def run(self) -> None:
        pending: list[Check] = []
        for _ in range(STEPS):
            pending.append(self.calls[self.common.integers(len(self.calls))]())
            if self.common.random() < 0.4:
                for i in self.own.permutation(len(pending)):
                    pending[i]()
                pending.clear()

    def draw(self) -> None:
        """Draw the properties of a call."""
        rng = self.common
        self.seed, self.dtype = int(rng.integers(1 << 60)), str(rng.choice(DTYPES))
        self.op, self.root = str(rng.choice(list(OPS))), int(rng.integers(self.comm.world_size))
        self.tail = tuple(rng.integers(1, 9, rng.integers(0, 3)).tolist())
        most = 100_000 if rng.random() < 0.05 else 60
        self.rows = int(rng.integers(0 if rng.random() < 0.1 else 1, most // len(self.tail or "1")))
        self.splits = rng.integers(0, 30, self.comm.world_size).tolist()

    def data(self, rank: int, rows: int, number: int = 0) -> Array:
        """Return the input of a rank; products of it are exact."""
        rng = np.random.default_rng([self.seed, rank, number])
        return rng.integers(1, 3, (rows, *self.tail)).astype(self.dtype)

    def everyones(self, rows: int, number: int = 0) -> list[Array]:
        return [self.data(rank, rows, number) for rank in range(self.comm.world_size)]

    def reduced(self, inputs: list[Array]) -> Array:
        result = inputs[0]
        for other in inputs[1:]:
            result = OPS[self.op](result, other)
        return result

    def ended(self, work: Any, expected: Array | None) -> Check:
        told = f"{self.dtype}, {self.op}, root {self.root}, seed {self.seed}"

        def check() -> None:
            found = work.wait(30)
            if expected is not None:
                np.testing.assert_array_equal(found, expected, told, strict=True)

        return check

    def all_reduce(self) -> Check:
        self.draw()
        x = np.asarray(
            self.data(self.comm.rank, self.rows), order=str(self.common.choice(["C", "F"]))
        )
        out = np.empty_like(x) if self.own.random() < 0.5 else x
        work = self.comm.all_reduce(x, self.op, out=out, async_op=True)
        return self.ended(work, self.reduced(self.everyones(self.rows)))

    def all_reduce_list(self) -> Check:
        self.draw()
        rows = self.common.integers(1, 20, 4).tolist()
        arrays = [self.data(self.comm.rank, count, i) for i, count in enumerate(rows)]
        work = self.comm.all_reduce(arrays, self.op, async_op=True)
        expected = [self.reduced(self.everyones(count, i)) for i, count in enumerate(rows)]

        def check() -> None:
            for one, other in zip(work.wait(30), expected, strict=True):
                np.testing.assert_array_equal(one, other, strict=True)

        return check

    def reduce(self) -> Check:
        self.draw()
        x = self.data(self.comm.rank, self.rows)
        work = self.comm.reduce(x, self.op, self.root, async_op=True)
        is_root = self.comm.rank == self.root
        return self.ended(work, self.reduced(self.everyones(self.rows)) if is_root else None)

    def broadcast(self) -> Check:
        self.draw()
        x = self.data(self.comm.rank, self.rows)
        work = self.comm.broadcast(x, self.root, async_op=True)
        return self.ended(work, self.data(self.root, self.rows))

    def all_gather(self) -> Check:
        self.draw()
        splits = self.splits if self.common.random() < 0.5 else None
        rows = [self.rows] * self.comm.world_size if splits is None else splits
        x = self.data(self.comm.rank, rows[self.comm.rank])
        work = self.comm.all_gather(x, splits=splits, async_op=True)
        parts = [self.data(rank, count) for rank, count in enumerate(rows)]
        return self.ended(work, np.concatenate(parts))

    def gather(self) -> Check:
        self.draw()
        work = self.comm.gather(self.data(self.comm.rank, self.rows), self.root, async_op=True)
        is_root = self.comm.rank == self.root
        return self.ended(work, np.concatenate(self.everyones(self.rows)) if is_root else None)

    def scatter(self) -> Check:
        self.draw()
        n, rank = self.comm.world_size, self.comm.rank
        whole = self.data(self.root, n * self.rows)
        out = np.empty_like(whole[: self.rows])
        given = whole if rank == self.root else None
        work = self.comm.scatter(given, self.root, out=out, async_op=True)
        return self.ended(work, whole[rank * self.rows : (rank + 1) * self.rows])

    def reduce_scatter(self) -> Check:
        self.draw()
        is_uneven = self.common.random() < 0.5
        rows = self.splits if is_uneven else [self.rows] * self.comm.world_size
        x = self.data(self.comm.rank, sum(rows))
        splits = self.splits if is_uneven else None
        work = self.comm.reduce_scatter(x, self.op, splits=splits, async_op=True)
        whole, begin = self.reduced(self.everyones(sum(rows))), sum(rows[: self.comm.rank])
        return self.ended(work, whole[begin : begin + rows[self.comm.rank]])

    def all_to_all(self) -> Check:
        self.draw()
        n, rank = self.comm.world_size, self.comm.rank
        rows = self.common.integers(0, 20, (n, n)).tolist()  # from, to
        if is_even := self.common.random() < 0.5:
            rows = [[self.rows] * n] * n
        x, splits = self.data(rank, sum(rows[rank])), None if is_even else rows[rank]
        work = self.comm.all_to_all(x, splits=splits, async_op=is_even)
        parts = []
        for source in range(n):
            begin = sum(rows[source][:rank])
            given = self.data(source, sum(rows[source]))
            parts.append(given[begin : begin + rows[source][rank]])
        if is_even:
            return self.ended(work, np.concatenate(parts))
        np.testing.assert_array_equal(work, np.concatenate(parts), strict=True)
        return lambda: None

    def _exchanged(self, **keywords: Any) -> tuple[list[Any], list[tuple[Array, Array]]]:
        """Send random messages, some to oneself, and receive them; the order of tags is random.

        Returns what the calls returned, and pairs of received and expected values.
        """
        self.draw()
        n, rank, works, pairs = self.comm.world_size, self.comm.rank, [], []
        places = self.common.integers(0, [n, n, 4], (12, 3)).tolist()  # from, to, tag
        sizes = self.common.choice([0, 1, 7, 300, 9000], 12).tolist()
        coming: dict[tuple[int, int], list[int]] = {}  # by source and tag
        for i, (source, to, tag) in enumerate(places):
            if to == rank:
                coming.setdefault((source, tag), []).append(i)
        going = [i for i, (source, _, _) in enumerate(places) if source == rank]
        while coming or going:
            if going and (not coming or self.own.random() < 0.5):
                i = going.pop(0)
                x = self.data(rank, sizes[i], i)
                works.append(self.comm.send(x, places[i][1], tag=places[i][2], **keywords))
                continue
            source, tag = list(coming)[self.own.integers(len(coming))]
            i = coming[source, tag].pop(0)
            if not coming[source, tag]:
                del coming[source, tag]
            expected = self.data(source, sizes[i], i)
            out = np.empty_like(expected)
            works.append(self.comm.recv(out, source, tag=tag, **keywords))
            pairs.append((out, expected))
        return works, pairs

    def messages(self) -> Check:
        works, pairs = self._exchanged(async_op=True)

        def check() -> None:
            for work in works:
                work.wait(30)
            for pair in pairs:
                np.testing.assert_array_equal(*pair, strict=True)

        return check

    def group(self) -> Check:
        with self.comm.group():
            _, pairs = self._exchanged()
        return lambda: [np.testing.assert_array_equal(*pair, strict=True) for pair in pairs]

    def from_any(self) -> Check:
        self.draw()
        others = {rank for rank in range(self.comm.world_size) if rank != self.comm.rank}
        x = self.data(self.comm.rank, self.rows)
        sent = [self.comm.send(x, to, tag=9, async_op=True) for to in others]
        while others:
            out = np.empty_like(x)
            source = self.comm.recv_any(out, tag=9)
            others.remove(source)
            np.testing.assert_array_equal(out, self.data(source, self.rows))
        self.comm.barrier()  # before others send with this tag again
        return lambda: [work.wait(30) for work in sent]

    def scan(self) -> Check:
        self.draw()
        found = self.comm.scan(self.data(self.comm.rank, self.rows), self.op)
        inputs = self.everyones(self.rows)[: self.comm.rank + 1]
        np.testing.assert_array_equal(found, self.reduced(inputs), strict=True)
        return lambda: None


def run_program(comm: Communicator, seed: int) -> None:
    Program(comm, seed).run()


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_processes(size: int) -> None:
    ranks = ProcessRanks(size)
    try:
        ranks.run(run_program, size)
    finally:
        ranks.close()


@pytest.mark.slow
@pytest.mark.parametrize("places", [((0,), (1,)), ((0, 1), (2, 3)), ((0, 2), (1,))])
def test_machines(places: tuple[tuple[int, ...], ...]) -> None:
    MachineThreads(places).run(run_program, len(places))
