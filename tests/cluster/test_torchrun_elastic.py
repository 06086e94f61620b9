"""torchrun's elastic agent: lost ranks, and nodes that leave and join."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from fastdist.cluster.address import reserved_ports  # noqa: E402
from fastdist.collectives.rendezvous.agent import agree_on_name  # noqa: E402
from fastdist.errors import ClusterConfigError  # noqa: E402
from launched import wait_until  # noqa: E402
from test_preemption import TRAIN, train_undisturbed  # noqa: E402

# With an address, since torchrun looks up the host's name again and again.
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--local-addr", "127.0.0.1"]


@pytest.mark.slow
def test_a_lost_rank_is_restarted_and_training_ends_as_if_undisturbed(tmp_path: Path) -> None:
    undisturbed, lost = tmp_path / "undisturbed", tmp_path / "lost"
    undisturbed.mkdir()
    lost.mkdir()
    expected = train_undisturbed(undisturbed, 3)
    (lost / "train.py").write_text(TRAIN)
    options = ["--standalone", "--nnodes", "1", "--nproc-per-node", "3", "--max-restarts", "2"]
    command = [*TORCHRUN, *options, str(lost / "train.py"), str(lost), "0.02", "sync"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as job:
        try:
            step = lost / "step0"
            wait_until(lambda: step.exists() and int(step.read_text() or 0) >= 7, 60)
            os.kill(int((lost / "pid1").read_text()), signal.SIGKILL)
            said, _ = job.communicate(timeout=120)
        finally:
            job.kill()
    assert job.returncode == 0
    assert said.split("\n")[:2] == ["begins at 0", "begins at 5"]
    assert (lost / "result").read_text() == expected


# Works until a file is there that says which step is the last; notes ranks that have connected.
NODE = """
import json, os, sys, time
from pathlib import Path
import numpy as np
import fastdist as fd
folder = Path(sys.argv[1])
comm = fd.init()
restarts = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
everyone = comm.all_gather_object(restarts)
if comm.rank == 0:
    with open(folder / "worlds", "a") as file:
        print(json.dumps(sorted(everyone)), file=file)
while not comm.all_reduce(np.array([(folder / "end").exists()], np.int64)).item():
    time.sleep(0.02)
"""


class Nodes:
    """Agents of one job on this machine, with two ranks each."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.agents: list[subprocess.Popen[bytes]] = []
        with reserved_ports(1) as [port]:
            self._port = port
        (folder / "node.py").write_text(NODE)

    def start(self) -> "subprocess.Popen[bytes]":
        options = ["--nnodes", "1:2", "--nproc-per-node", "2", "--max-restarts", "3"]
        options += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{self._port}"]
        options += ["--monitor-interval", "0.2"]
        quick = "last_call_timeout=2,keep_alive_interval=2,keep_alive_max_attempt=4"
        options += ["--rdzv-id", "nodes", "--rdzv-conf", quick]
        # An agent that shares its store gives ranks another's address when nodes change.
        environ = os.environ | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        with (self._folder / f"log{len(self.agents)}").open("wb") as log:
            agent = subprocess.Popen(
                [*TORCHRUN, *options, str(self._folder / "node.py"), str(self._folder)],
                env=environ,
                stderr=log,
                start_new_session=True,
            )
        self.agents.append(agent)
        return agent

    def await_world(self, size: int) -> list[int]:
        """Wait until so many ranks have met last; return their counts of restarts."""

        def last() -> list[int]:
            file = self._folder / "worlds"
            lines = file.read_text().split("\n")[:-1] if file.exists() else []
            return list(json.loads(lines[-1])) if lines else []

        try:
            wait_until(lambda: len(last()) == size, 120)
        except AssertionError:
            logs = (self._folder / f"log{number}" for number in range(len(self.agents)))
            raise AssertionError("\n".join(log.read_text()[-3000:] for log in logs)) from None
        return last()

    @staticmethod
    def kill(agent: "subprocess.Popen[bytes]") -> None:
        """Kill a node: the agent, and its ranks, which have process groups of their own."""
        for pid in [*_children(agent.pid), agent.pid]:
            os.kill(pid, signal.SIGKILL)
        agent.wait()


def _children(pid: int) -> list[int]:
    files = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for file in files for child in file.read_text().split()]


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    nodes = Nodes(tmp_path)
    yield nodes
    for agent in nodes.agents:
        if agent.poll() is None:
            nodes.kill(agent)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_node_leaves_and_another_joins(nodes: Nodes, tmp_path: Path) -> None:
    stays = nodes.start()  # holds the agents' store
    nodes.await_world(2)
    leaves = nodes.start()
    nodes.await_world(4)
    nodes.kill(leaves)
    nodes.await_world(2)
    joins = nodes.start()
    restarts = nodes.await_world(4)
    assert len(set(restarts)) == 2  # agents count for themselves
    (tmp_path / "end").touch()
    assert [agent.wait(60) for agent in (stays, joins)] == [0, 0]


class Agreement:
    """Ranks as threads, that agree in one store again and again."""

    def __init__(self) -> None:
        self.store = torch.distributed.HashStore()
        self._threads = ThreadPoolExecutor(8)

    def run(self, rank: int, size: int, seconds: float = 10) -> Callable[[], str]:
        deadline = time.monotonic() + seconds
        return self._threads.submit(agree_on_name, self.store, rank, size, deadline).result


def test_every_agreement_has_a_name_of_its_own() -> None:
    agreement, names = Agreement(), set()
    for size in (2, 4, 4, 1, 3):
        ranks = [agreement.run(rank, size) for rank in reversed(range(size))]
        [name] = {rank() for rank in ranks}
        names.add(name)
    assert len(names) == 5


def test_ranks_of_an_agreement_that_failed_are_not_counted() -> None:
    agreement = Agreement()
    lost = [agreement.run(1, 3, 0.2), agreement.run(0, 3, 0.2)]
    for rank in lost:
        with pytest.raises(ClusterConfigError, match=r"did not arrive in time"):
            rank()
    leader, last = agreement.run(0, 3), agreement.run(2, 3)
    threading.Event().wait(0.2)  # rank 1's number is that of the rank that has given up
    assert {agreement.run(1, 3)(), leader(), last()} == {leader()}


def test_missing_ranks_are_named() -> None:
    agreement = Agreement()
    last, leader = agreement.run(2, 4, 0.5), agreement.run(0, 4, 0.3)
    with pytest.raises(ClusterConfigError, match="did not arrive"):
        last()
    with pytest.raises(ClusterConfigError, match=r"ranks \[1, 3\] did not arrive") as told:
        leader()
    assert told.value.ranks == (1, 3)
