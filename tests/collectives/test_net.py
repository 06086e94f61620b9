"""The contract of communicators, for ranks on several machines; the machines are simulated."""

from __future__ import annotations

import gc
import itertools
import os
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import contract
import numpy as np
import pytest
from contract import CommunicatorContract
from fastdist import Communicator
from fastdist.collectives.engines.host import HostEngine
from fastdist.collectives.engines.net import NetEngine, Rendezvous
from fastdist.collectives.rendezvous.connections import listen_at
from fastdist.errors import (
    ClusterConfigError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    PeerFailureError,
)
from ranks import run_in_threads

TIMEOUT_S = 60.0
LOCAL = "127.0.0.1"
_names = itertools.count()
Places = tuple[tuple[int, ...], ...]


class MachineThreads:
    """Ranks as threads that share memory within their machine alone; made anew for every call."""

    def __init__(self, places: Places) -> None:
        self.places = places
        self.machines = [m for _, m in sorted((r, m) for m, own in enumerate(places) for r in own)]
        self.size = len(self.machines)

    def makers(self) -> list[Callable[[], NetEngine]]:
        """Return functions that make each rank's engine, to be called in the rank's thread."""
        inner = {
            rank: engine
            for place in self.places
            for rank, engine in zip(place, HostEngine.of_threads(len(place)), strict=True)
        }
        listeners = [listen_at(LOCAL) for _ in range(self.size)]
        addresses = [listener.getsockname() for listener in listeners]
        key = f"test{next(_names)}"

        def make(rank: int) -> NetEngine:
            found = Rendezvous(rank, self.machines, key, addresses, listeners[rank])
            return NetEngine(found, inner[rank], TIMEOUT_S)

        return [lambda rank=rank: make(rank) for rank in range(self.size)]  # type: ignore[misc]

    def run(self, function: Callable[..., Any], *args: Any, limit_s: float = 60) -> list[Any]:
        makers = [lambda make=make: Communicator(make(), TIMEOUT_S) for make in self.makers()]
        return run_in_threads(makers, function, args, limit_s)

    def close(self) -> None:
        pass


class MachineContract(CommunicatorContract):
    def test_compression(self, ranks: Any) -> None:
        """Totals are compressed between machines, so that bits differ from the contract's."""
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


def machines_of(sizes: dict[int, Places]) -> Callable[[int], MachineThreads]:
    """Make a class of ranks whose machines depend on the number of ranks."""
    return lambda size: MachineThreads(sizes[size])


@pytest.fixture(autouse=True)
def _few_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """One size per way: empty, with the record, one chunk, several chunks, two crossings."""
    monkeypatch.setattr(contract, "SIZES", [0, 1, 17, 1_000, 5_003, 90_001, 300_007])


class TestOneRankEach(MachineContract):
    ranks_class = staticmethod(machines_of({2: ((0,), (1,)), 3: ((0,), (1,), (2,))}))
    worlds = doomed_worlds = (3,)
    slow_worlds = slow_doomed_worlds = (2,)


class TestUnevenMachines(MachineContract):
    ranks_class = staticmethod(machines_of({3: ((0, 2), (1,))}))
    worlds = doomed_worlds = (3,)


class TestEvenMachines(MachineContract):
    ranks_class = staticmethod(machines_of({4: ((0, 3), (1, 2)), 6: ((0, 1), (2, 3), (4, 5))}))
    worlds = doomed_worlds = (4,)
    slow_worlds = slow_doomed_worlds = (6,)


EVERY_KIND = [((0,), (1,), (2,)), ((0, 2), (1,)), ((0, 3), (1, 2))]


def round_once(comm: Communicator) -> None:
    x = np.full(3, 2048.0 if comm.rank == 0 else 1.0, np.float16)
    comm.all_reduce(x)
    assert (x == np.float16(2048.0 + comm.world_size - 1)).all()


@pytest.mark.parametrize("places", EVERY_KIND, ids=str)
def test_small_floats_are_rounded_once(places: Places) -> None:
    MachineThreads(places).run(round_once)


def mean_of_many(comm: Communicator) -> bytes:
    arrays = [np.full(size, comm.rank + 0.1, np.float32) for size in (3, 70_000, 9)]
    comm.all_reduce(arrays, "mean")
    comm.all_reduce(arrays[0], "mean")
    one = np.full(3, comm.rank + 0.1, np.float32)
    comm.all_reduce(one, "mean")  # by another path than a list
    assert (one == arrays[1][:3]).all()
    return b"".join(x.tobytes() for x in arrays)


@pytest.mark.parametrize("places", EVERY_KIND, ids=str)
def test_every_path_gives_the_same_bits(places: Places) -> None:
    assert len(set(MachineThreads(places).run(mean_of_many))) == 1


def other_compression(comm: Communicator) -> None:
    with pytest.raises(CollectiveMismatchError, match='compress="bf16"'):
        comm.all_reduce(np.ones(4, np.float32), compress="bf16" if comm.rank else "fp16")
    comm.barrier()


def test_ranks_must_agree_on_compression() -> None:
    MachineThreads(((0,), (1,))).run(other_compression)


def go_on_after_memory_is_full(comm: Communicator) -> float:
    def summed(count: int) -> float:
        arrays = [np.full(count, comm.rank + 1.0, np.float16) for _ in range(2)]
        comm.all_reduce(arrays)
        return float(arrays[1][-1])

    summed(2000)
    held, size = [], 1 << 46
    while size >= 1 << 16:
        try:
            held.append(comm.empty(size, np.uint8))
        except MemoryError:
            size //= 2
    with pytest.raises(MemoryError, match="bytes left"):
        summed(1 << 20)
    return summed(2000)


def test_calls_go_on_after_memory_is_full() -> None:
    assert MachineThreads(((0,), (1,))).run(go_on_after_memory_is_full) == [3.0, 3.0]


def check_compared_with_others(comm: Communicator) -> int:
    """Compare a call of another engine, as for arrays on GPUs."""

    def compare(count: int) -> None:
        assert comm.engine.compiled is not None
        comm.engine.compiled.compare("all_reduce", "float32", "sum", 0, count, 0, TIMEOUT_S)

    compare(5)
    with pytest.raises(CollectiveMismatchError) as error:
        compare(6 + comm.rank)
    for rank in range(comm.world_size):
        line = f'rank {rank}: all_reduce(float32 × {6 + rank}, op="sum") at {__file__}:'
        assert line in str(error.value)
    with pytest.raises(CollectiveMismatchError, match="rank 1: barrier"):
        compare(5) if comm.rank == 0 else comm.barrier()
    return int(comm.all_reduce(np.ones(1))[0])


@pytest.mark.parametrize("places", EVERY_KIND, ids=str)
def test_calls_of_other_engines_are_compared_in_order(places: Places) -> None:
    ranks = MachineThreads(places)
    assert ranks.run(check_compared_with_others) == [ranks.size] * ranks.size


def gather_more_than_links_hold(comm: Communicator) -> None:
    n, r = comm.world_size, comm.rank
    x = np.full(4_000_000, r + 1.0, np.float32)
    for _ in range(3):
        gathered = comm.all_gather(x, timeout=5.0).reshape(n, -1)
        assert (gathered[:, -1] == np.arange(1, n + 1)).all()
        assert (comm.broadcast(x.copy(), 1, timeout=5.0) == 2).all()
        assert (comm.all_reduce(x.copy(), timeout=5.0) == n * (n + 1) / 2).all()
        assert (comm.reduce_scatter(x, timeout=5.0) == n * (n + 1) / 2).all()
        received = comm.all_to_all(x, timeout=5.0).reshape(n, -1)
        assert (received[:, 0] == np.arange(1, n + 1)).all()
        joined = comm.gather(x, 0, timeout=5.0)
        assert joined is None or joined[-1] == n


@pytest.mark.slow
def test_arrays_that_fill_the_links() -> None:
    MachineThreads(((0, 1), (2, 3))).run(gather_more_than_links_hold)


def connections() -> dict[int, int]:
    """Return the descriptor of each of this process's TCP connections, by inode."""
    found = {}
    for path in Path("/proc/self/fd").iterdir():
        if not path.is_socket():
            continue
        with suppress(OSError), socket.socket(fileno=os.dup(int(path.name))) as its_socket:
            if its_socket.family == socket.AF_INET and its_socket.getpeername():
                found[os.fstat(its_socket.fileno()).st_ino] = int(path.name)
    return found


def use_all_connections(comm: Communicator) -> None:
    x = np.ones(1)
    while True:
        comm.all_reduce(x)
        for first, second in itertools.combinations(range(comm.world_size), 2):
            if comm.rank == first:
                comm.send(x, second)
                comm.recv(x, second)
            elif comm.rank == second:
                comm.recv(x, first)
                comm.send(x, first)


def lose_connection(
    comm: Communicator, known: dict[int, int], which: int, met: threading.Barrier
) -> str:
    comm.barrier()
    met.wait()  # all have left the collective
    if comm.rank == 0:
        lost = [fd for inode, fd in sorted(connections().items()) if inode not in known][which]
        with socket.socket(fileno=os.dup(lost)) as its_socket:
            its_socket.shutdown(socket.SHUT_RDWR)
    with pytest.raises(PeerFailureError) as error:
        use_all_connections(comm)
    assert comm.rank not in error.value.ranks
    return str(error.value).partition("; last collective")[0]


@pytest.mark.parametrize("which", range(0, 18, 4))
def test_a_lost_connection_is_no_death(which: int) -> None:
    """No rank is told that it has died itself."""
    met = threading.Barrier(3)
    texts = MachineThreads(((0,), (1,), (2,))).run(lose_connection, connections(), which, met)
    for rank, text in enumerate(texts):
        assert "connection" in text
        assert f"rank {rank} has died" not in text


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_forked_children_have_no_connections() -> None:
    """A file that has the number of a connection later is none."""

    def is_closed_in_child() -> bool:
        if (pid := os.fork()) == 0:
            with suppress(Exception):
                os._exit(Path(f"/proc/self/fd/{number}").is_socket())
            os._exit(2)
        return os.waitpid(pid, 0)[1] == 0

    known = connections()
    with ThreadPoolExecutor() as pool:
        engines = list(pool.map(lambda make: make(), MachineThreads(((0,), (1,))).makers()))
    numbers = [fd for inode, fd in connections().items() if inode not in known]
    assert len(numbers) == 6
    for number in numbers:
        assert is_closed_in_child()
        assert Path(f"/proc/self/fd/{number}").is_socket()
    del engines
    gc.collect()
    with socket.create_server((LOCAL, 0)) as its_socket:
        os.dup2(its_socket.fileno(), number)
        assert not is_closed_in_child()
        os.close(number)


def wait_for_the_last(comm: Communicator) -> str:
    comm.all_reduce(np.ones(1))
    if comm.rank == 2:
        time.sleep(3)
        with pytest.raises(CollectiveTimeoutError, match="gave up waiting for rank 2"):
            comm.barrier()
        return ""
    with pytest.raises(CollectiveTimeoutError) as error:
        comm.all_reduce(np.ones(1), timeout=1.5)
    assert error.value.ranks == (2,)
    return str(error.value)


@pytest.mark.slow
def test_the_last_calls_are_up_to_date() -> None:
    texts = MachineThreads(((0,), (1,), (2,))).run(wait_for_the_last)
    for text in texts[:2]:
        for rank, call in enumerate((2, 2, 1)):
            assert f"rank {rank}: call {call}, all_reduce" in text


@pytest.mark.slow
def test_ranks_that_cannot_connect() -> None:
    """Whatever keeps ranks from the first communicator is an error of the cluster."""
    listeners = [listen_at(LOCAL) for _ in range(2)]
    addresses = [listener.getsockname() for listener in listeners]

    def connect(rank: int) -> str:
        (inner,) = HostEngine.of_threads(1)
        found = Rendezvous(rank, [0, 1], f"key {rank}", addresses, listeners[rank])
        with pytest.raises(ClusterConfigError) as error:
            NetEngine(found, inner, 2.0)
        assert error.value.ranks == (1 - rank,)
        return str(error.value)

    with ThreadPoolExecutor(2) as pool:
        late, other = pool.map(connect, range(2))
    assert "could not connect in time to rank 1" in late
    assert "rank 1 found another program than rank 0 of its job" in other
