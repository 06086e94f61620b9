"""The contract of communicators, for engines between machines; ranks are threads."""

from __future__ import annotations

import itertools
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

import contract
import numpy as np
import pytest
from contract import CommunicatorContract
from fastdist import Communicator
from fastdist.collectives.arrays import DTYPES
from fastdist.collectives.engines import gloo
from fastdist.collectives.engines.engine import Engine
from fastdist.collectives.engines.gloo import GlooEngine
from fastdist.collectives.engines.groups import engine_in_groups
from fastdist.collectives.engines.hierarchical import HierarchicalEngine
from fastdist.collectives.engines.host import HostEngine
from fastdist.collectives.engines.layout import Layout
from fastdist.collectives.engines.machine_links import MachineLinks
from fastdist.errors import CollectiveMismatchError
from ranks import RankError
from reference import SMALL_FLOATS, reduced

torch = pytest.importorskip("torch")
pytest.importorskip("torch.distributed")

TIMEOUT_S = 60.0
# The ranks of each machine, by world size; not contiguous if possible.
MACHINES = {2: ((0,), (1,)), 3: ((0, 2), (1,)), 4: ((0, 3), (1, 2))}
_names = itertools.count()
_store = torch.distributed.HashStore()


def new_store() -> Any:
    return torch.distributed.PrefixStore(f"test{next(_names)}", _store)


class EngineThreads:
    """Ranks as threads, each with an engine of its own; made anew for every call."""

    def __init__(self, size: int) -> None:
        self.size = size

    def makers(self) -> list[Callable[[], Engine]]:
        """Return functions that make each rank's engine, to be called in the rank's thread."""
        raise NotImplementedError

    def run(self, function: Callable[..., Any], *args: Any, limit_s: float = 60) -> list[Any]:
        results: list[Any] = [None] * self.size
        errors: dict[int, BaseException | str] = {}
        communicators: list[Communicator] = []

        def body(rank: int, make: Callable[[], Engine]) -> None:
            try:
                comm = Communicator(make(), TIMEOUT_S)
                communicators.append(comm)
                results[rank] = function(comm, *args)
            except BaseException:
                errors[rank] = traceback.format_exc()

        threads = [
            threading.Thread(target=body, args=(rank, make), daemon=True)
            for rank, make in enumerate(self.makers())
        ]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + limit_s
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if any(thread.is_alive() for thread in threads):
            errors[-1] = f"still running after {limit_s} s"
        if errors:
            raise RankError(errors)
        for comm in communicators:
            comm.close()
        return results

    def close(self) -> None:
        pass


def gloo_makers(size: int, lanes_only: bool = False) -> list[Callable[[], GlooEngine]]:
    store = new_store()

    def make(rank: int) -> GlooEngine:
        return GlooEngine(store, rank, size, "127.0.0.1", TIMEOUT_S, lanes_only)

    return [lambda rank=rank: make(rank) for rank in range(size)]  # type: ignore[misc]


class GlooThreads(EngineThreads):
    """One rank per machine."""

    def makers(self) -> list[Callable[[], Engine]]:
        return list(gloo_makers(self.size))


class MachineThreads(EngineThreads):
    """Several ranks per machine; the machines are simulated."""

    def makers(self) -> list[Callable[[], Engine]]:
        layout = Layout(MACHINES[self.size])
        inner = {
            rank: engine
            for place in layout.places
            for rank, engine in zip(place, HostEngine.of_threads(len(place)), strict=True)
        }
        store = new_store()
        flat = gloo_makers(self.size, lanes_only=True)

        def make(rank: int) -> Engine:
            links = MachineLinks(flat[rank](), layout, store, TIMEOUT_S)
            return HierarchicalEngine(layout, rank, inner[rank], links)

        return [lambda rank=rank: make(rank) for rank in range(self.size)]  # type: ignore[misc]


class GroupThreads(EngineThreads):
    """Threads in two groups of neighbouring ranks."""

    def makers(self) -> list[Callable[[], Engine]]:
        width = (self.size + 1) // 2
        flat = HostEngine.of_threads(self.size)
        return [
            lambda engine=engine: engine_in_groups(engine, width, TIMEOUT_S)  # type: ignore[misc]
            for engine in flat
        ]


def reduced_by_place(places: tuple[tuple[int, ...], ...]) -> Callable[..., Any]:
    """Reduce like a hierarchy: each place in order, then the places; a mean divides last."""

    def in_two_levels(inputs: list[np.ndarray], op: str) -> np.ndarray:
        dtype = inputs[0].dtype
        small = dtype.name in SMALL_FLOATS
        wide = [x.astype(np.float32) for x in inputs] if small else inputs
        summed = "sum" if op == "mean" else op
        result = reduced([reduced([wide[r] for r in ranks], summed) for ranks in places], summed)
        if op == "mean":
            parts = result.view(result.real.dtype)
            result = (parts / np.array(len(inputs), parts.dtype)).view(result.dtype)
        with np.errstate(all="ignore"):
            return result.astype(dtype)

    return in_two_levels


class HierarchyContract(CommunicatorContract):
    """The contract, with the sums of a hierarchy, which adds floats in another order."""

    @staticmethod
    def places(size: int) -> tuple[tuple[int, ...], ...]:
        raise NotImplementedError

    @pytest.fixture(autouse=True)
    def _two_levels(self, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
        fixture = "ranks" if "ranks" in request.fixturenames else "doomed_ranks"
        size = request.getfixturevalue(fixture).size
        monkeypatch.setattr(contract, "reduced", reduced_by_place(self.places(size)))

    def test_compression(self, ranks: Any) -> None:
        """Totals are compressed between places, so that bits differ from the contract's."""
        ranks.run(check_compression_roughly)


def check_compression_roughly(comm: Communicator) -> None:
    n = comm.world_size
    for dtype in ("float32", "float64"):
        for size in (0, 3, 5_000):
            inputs = [
                np.random.default_rng([r, size]).standard_normal(size).astype(dtype)
                for r in range(n)
            ]
            for op, exact in (("sum", sum(inputs)), ("mean", sum(inputs) / n)):
                for name, error in (("bf16", 0.02), ("fp16", 0.002), ("fp8", 0.07)):
                    x = [inputs[comm.rank].copy(), inputs[comm.rank].copy() / 1000]
                    comm.all_reduce(x, op, compress=name)
                    largest = max([np.abs(v).max() for v in inputs if v.size] or [1]) * n
                    assert np.abs(x[0] - exact).max(initial=0) <= error * largest
                    assert np.abs(x[1] * 1000 - exact).max(initial=0) <= error * largest
                    everyone = comm.all_gather(x[0]).reshape(n, -1)
                    assert (everyone == everyone[0]).all()


@pytest.fixture(autouse=True)
def _few_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """One size per path: empty, with the signature, one step, slices, chunks, buckets."""
    monkeypatch.setattr(contract, "SIZES", [0, 1, 17, 1_000, 5_003, 90_001])
    monkeypatch.setattr(gloo, "_CHUNK_BYTES", 100_000)
    monkeypatch.setattr(gloo, "_LEAST_SLICE_BYTES", 1_000)
    monkeypatch.setattr(gloo, "_BUCKET_BYTES", 500_000)


class TestGloo(CommunicatorContract):
    ranks_class = GlooThreads
    worlds = doomed_worlds = (3,)
    slow_worlds = slow_doomed_worlds = (2,)


class TestMachines(HierarchyContract):
    ranks_class = MachineThreads
    worlds = doomed_worlds = (3,)  # machines of two ranks and of one; four are in test_machines.py
    places = staticmethod(MACHINES.__getitem__)


class TestGroups(HierarchyContract):
    ranks_class = GroupThreads
    worlds = doomed_worlds = (4,)

    @staticmethod
    def places(size: int) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(range(p * size // 2, (p + 1) * size // 2)) for p in range(2))


def round_once(comm: Communicator) -> None:
    x = np.full(3, 2048.0 if comm.rank == 0 else 1.0, np.float16)
    comm.all_reduce(x)
    assert (x == np.float16(2048.0 + comm.world_size - 1)).all()


@pytest.mark.parametrize("kind", [GlooThreads, MachineThreads])
def test_small_floats_are_rounded_once(kind: type[EngineThreads]) -> None:
    kind(3).run(round_once)


def mean_of_many(comm: Communicator) -> bytes:
    arrays = [np.full(size, comm.rank + 0.1, np.float32) for size in (3, 70_000, 9)]
    comm.all_reduce(arrays, "mean")
    comm.all_reduce(arrays[0], "mean")
    one = np.full(3, comm.rank + 0.1, np.float32)
    comm.all_reduce(one, "mean")  # by another path than a list
    assert (one == arrays[1][:3]).all()
    return b"".join(x.tobytes() for x in arrays)


@pytest.mark.parametrize("kind", [GlooThreads, MachineThreads])
def test_every_path_gives_the_same_bits(kind: type[EngineThreads]) -> None:
    assert len(set(kind(3).run(mean_of_many))) == 1


def other_compression(comm: Communicator) -> None:
    with pytest.raises(CollectiveMismatchError, match='compress="bf16"'):
        comm.all_reduce(np.ones(4, np.float32), compress="bf16" if comm.rank else "fp16")
    comm.barrier()


def test_ranks_must_agree_on_compression() -> None:
    GlooThreads(2).run(other_compression)


# --- calls on GPUs are compared by engines between machines ---------------------------------


def check_compared_for_gpus(comm: Communicator) -> list[Any]:
    """Compare an all_reduce of `count` float32 numbers on GPUs, encoded by the compiled module."""

    def agree(count: int, flag: bool) -> Any:
        words = (DTYPES.index("float32") << 8 | 1 << 7, count, 0)
        return comm.engine.call_checker.agree(words, flag, f"train.py:{count}", TIMEOUT_S)

    found = [agree(5, True), agree(5, comm.rank != 0)]
    with pytest.raises(CollectiveMismatchError) as error:
        agree(6 + comm.rank, True)
    text = str(error.value)
    for rank in range(comm.world_size):
        assert f'all_reduce(float32 × {6 + rank}, on GPUs, op="sum") at train.py:{6 + rank}' in text
    with pytest.raises(CollectiveMismatchError, match="rank 1: barrier"):
        agree(5, True) if comm.rank == 0 else comm.barrier()
    return [*found, int(comm.all_reduce(np.ones(1))[0])]


@pytest.mark.parametrize("kind", [GlooThreads, MachineThreads])
def test_calls_on_gpus_are_compared_in_order_with_others(kind: type[EngineThreads]) -> None:
    assert kind(2).run(check_compared_for_gpus) == [[True, False, 2]] * 2
