"""torchft's process group and manager on fastdist."""

import gc
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("torchft")

import torch.distributed as dist  # noqa: E402
from ranks import ProcessRanks  # noqa: E402


@pytest.fixture(scope="module")
def ranks() -> Iterator[ProcessRanks]:
    ranks = ProcessRanks(3)
    yield ranks
    ranks.close()


@pytest.fixture(scope="module")
def store() -> Any:
    return dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)


def made(seconds: float = 30) -> Any:
    from fastdist.integrations.torchft import ProcessGroupFastdist

    return ProcessGroupFastdist(timeout=timedelta(seconds=seconds))


def configure(group: Any, port: int, quorum: object, rank: int, size: int) -> None:
    """Configure a group as a manager does: the releases of torchft differ."""
    from torchft import process_group

    address = f"localhost:{port}/{quorum}"
    if hasattr(group, "configure"):
        group.configure(address, "replica", rank, size)
    else:
        process_group.reconfigure_with_store(group, address, rank, size)


def sizes_that_change(comm: Any, port: int) -> None:
    group = made()
    assert group.errored() is None
    for quorum, members in enumerate(([0, 1, 2], [2, 0], [1, 2, 0], [0])):
        if comm.rank in members:
            place, size = members.index(comm.rank), len(members)
            configure(group, port, f"sizes/{quorum}", place, size)
            assert group.size() == size
            x = torch.tensor([comm.rank + 1.0])
            group.allreduce([x], dist.ReduceOp.SUM).wait()
            assert x.item() == sum(rank + 1 for rank in members)
            y = torch.zeros(1) + comm.rank
            group.broadcast_one(y, size - 1).wait()
            assert y.item() == members[-1]
            assert group.errored() is None
        comm.barrier()
    group.shutdown()


def test_sizes_change(ranks: ProcessRanks, store: Any) -> None:
    ranks.run(sizes_that_change, store.port)


def an_abort(comm: Any, port: int) -> float:
    group = made()
    configure(group, port, "abort", comm.rank, comm.world_size)
    x = torch.ones(1 << 20)
    if comm.rank == 0:
        threading.Timer(0.3, group.abort).start()
    began = time.monotonic()
    if comm.rank != 2:  # which comes when the others have given up
        with pytest.raises(dist.DistBackendError):
            group.allreduce([x], dist.ReduceOp.SUM).wait()
    took = time.monotonic() - began
    comm.barrier()
    assert isinstance(group.errored(), dist.DistBackendError) or comm.rank == 2
    with pytest.raises(dist.DistBackendError):
        group.allreduce([x], dist.ReduceOp.SUM).wait()
    assert isinstance(group.errored(), dist.DistBackendError)
    configure(group, port, "after", comm.rank, comm.world_size)
    assert group.errored() is None
    group.allreduce([x], dist.ReduceOp.SUM).wait()
    group.shutdown()
    return took


def test_an_abort_ends_calls_and_the_next_quorum_works(ranks: ProcessRanks, store: Any) -> None:
    assert max(ranks.run(an_abort, store.port)) < 2


def resources() -> tuple[int, int, int]:
    """Return the numbers of threads and descriptors, and the memory in KiB."""
    gc.collect()
    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[1])
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd")), pages * 4


def many_quorums(comm: Any, port: int, count: int) -> list[int]:
    from torchft import process_group

    client = dist.TCPStore("localhost", port, is_master=False, wait_for_workers=False)
    # Every tenth connection to a store takes seconds on machines without a name server.
    process_group.create_store_client = lambda address, timeout: dist.PrefixStore(address, client)
    group = made()
    x = torch.ones(1 << 18)

    def pass_quorum(name: object) -> None:
        configure(group, port, f"many/{name}", comm.rank, comm.world_size)
        work = group.allreduce([x], dist.ReduceOp.AVG)
        work.get_future().wait()

    for number in range(10):
        pass_quorum(f"first {number}")
    before = resources()
    for number in range(count):
        pass_quorum(number)
    grown = [now - then for now, then in zip(resources(), before, strict=True)]
    group.shutdown()
    return grown


@pytest.mark.slow
def test_quorums_leak_nothing(ranks: ProcessRanks, store: Any) -> None:
    for threads, files, kib in ranks.run(many_quorums, store.port, 100):
        assert max(threads, files) <= 1  # one may come or go at any moment; a leak is 100
        assert kib < 4096


PROGRAM = Path(__file__).with_name("torchft_program.py")


class Replica:
    """A replica group of `torchft_program`, in a process of its own."""

    def __init__(self, number: int, lighthouse: str, file: Path, last: Path) -> None:
        self._file = file
        command = [sys.executable, str(PROGRAM), str(number), str(file), str(last)]
        with open(f"{file}.log", "w") as log:
            self.process = subprocess.Popen(
                command, env=os.environ | {"TORCHFT_LIGHTHOUSE": lighthouse}, stderr=log
            )

    def committed(self) -> dict[int, tuple[int, str]]:
        """Return the number of participants and the digest after each step."""
        if not self._file.exists():
            return {}
        lines = [line.split() for line in self._file.read_text().split("\n")[:-1]]
        return {int(step): (int(count), digest) for step, count, digest in lines}

    def await_step(self, participants: int, least: int = 0) -> int:
        """Wait for a step, `least` or later, with so many participants; return its number."""
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            for step, (count, _) in self.committed().items():
                if step >= least and count == participants:
                    return step
            time.sleep(0.02)
        raise AssertionError(Path(f"{self._file}.log").read_text()[-4000:])


@pytest.mark.slow
def test_training_survives_the_loss_of_a_replica(tmp_path: Path) -> None:
    """Two replica groups, one of which is killed, and comes back with a survivor's state."""
    from torchft.coordination import LighthouseServer

    lighthouse = LighthouseServer(
        bind="[::]:0",
        min_replicas=1,
        join_timeout_ms=500,
        quorum_tick_ms=50,
        heartbeat_timeout_ms=1000,
    )
    last = tmp_path / "last"
    replicas = [Replica(n, lighthouse.address(), tmp_path / f"{n}", last) for n in (0, 1)]
    first, killed = replicas
    try:
        together = first.await_step(2)
        first.await_step(2, together + 10)
        killed.process.kill()
        killed.process.wait()
        # On a busy machine each may have trained alone before.
        alone = first.await_step(1, max(first.committed()) + 1)
        back = Replica(1, lighthouse.address(), tmp_path / "back", last)
        replicas.append(back)
        together = first.await_step(2, alone)
        (tmp_path / "end").write_text(f"{together + 100}")
        (tmp_path / "end").rename(last)
        assert [replica.process.wait(60) for replica in (first, back)] == [0, 0]
    finally:
        for replica in replicas:
            replica.process.kill()
            replica.process.wait()
        lighthouse.shutdown()
    of_first = first.committed()
    assert max(of_first) == together + 100
    # The states are the same after every step that the replicas took together.
    for other in (killed, back):
        shared = {step: of for step, of in other.committed().items() if of[0] == 2}
        assert len(shared) >= 10
        assert all(of_first[step] == of for step, of in shared.items())
