"""A parameter-server job on two machines, and the cable between them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from machines import Network, network, ports

pytest.importorskip("torch")
__all__ = ["network"]  # a fixture

CHIEF = """
    import sys, time
    import fastdist as fd
    import torch
    from fastdist.errors import UnavailableError

    strategy = fd.ParameterServerStrategy()
    coordinator = fd.ClusterCoordinator(strategy)
    with strategy.scope():
        model = torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(3)) for _ in range(4)])
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

    def step():
        time.sleep(0.1)
        optimizer.zero_grad()
        sum(parameter.sum() for parameter in model).neg().backward()
        optimizer.step()
        return fd.get_worker_index()

    def train(count):
        values = [coordinator.schedule(step) for _ in range(count)]
        coordinator.join()
        return sorted(set(coordinator.fetch(values)))

    while len(coordinator.workers) < 2:
        time.sleep(0.01)
    print(train(20), [parameter.tolist() for parameter in model], flush=True)
    strategy.save(sys.argv[1])
    print("saved", flush=True)
    sys.stdin.readline()  # the cable is cut
    try:
        train(20)
    except UnavailableError as error:
        print(error, flush=True)
    sys.stdin.readline()  # the cable is connected again
    while True:
        try:
            strategy.restore(sys.argv[1])
            break
        except UnavailableError:
            time.sleep(0.2)
    while len(coordinator.workers) < 2:
        time.sleep(0.01)
    print(train(20), [parameter.tolist() for parameter in model], flush=True)
"""


class Job:
    """A chief, a server and a worker on one machine, a server and a worker on the other."""

    def __init__(self, network: Network, directory: str) -> None:
        self._network = network
        self._stack = ExitStack()
        self._tasks: list[subprocess.Popen[str]] = []

        def address(machine: int) -> str:
            return f"{network.addresses[machine]}:{next(ports)}"

        self._cluster = {
            "chief": [address(0)],
            "worker": [address(0), address(1)],
            "ps": [address(0), address(1)],
        }
        for job in ("ps", "worker"):
            for index in (0, 1):
                self._start(index, job, index, directory)
        self.chief = self._start(0, "chief", 0, directory)

    def _start(self, machine: int, job: str, index: int, directory: str) -> subprocess.Popen[str]:
        config = {"cluster": self._cluster, "task": {"type": job, "index": index}}
        env = {**os.environ, "TF_CONFIG": json.dumps(config)}
        env["OMP_NUM_THREADS"] = "1"
        script = [sys.executable, "-W", "error", "-c", textwrap.dedent(CHIEF), directory]
        task = subprocess.Popen(
            self._network.command(machine, *script),
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._tasks.append(self._stack.enter_context(task))
        return task

    def read(self) -> str:
        """Return the next line of the chief."""
        assert self.chief.stdout is not None
        return self.chief.stdout.readline().strip()

    def go_on(self) -> None:
        """Let the chief continue."""
        assert self.chief.stdin is not None
        self.chief.stdin.write("\n")
        self.chief.stdin.flush()

    def close(self) -> None:
        for task in self._tasks:
            task.kill()
        self._stack.close()


@pytest.fixture
def job(network: Network, tmp_path: object) -> Iterator[Job]:
    job = Job(network, str(tmp_path))
    yield job
    job.close()


def test_two_machines_and_a_cut_cable(job: Job, network: Network) -> None:
    """Tasks behind a cut cable are lost within seconds, and come back with the cable."""
    assert job.read() == f"[0, 1] {[[20.0] * 3] * 4}"
    assert job.read() == "saved"
    network.set_cable("down")
    job.go_on()
    error = job.read()
    assert "server 1 at tcp://10.213.7.2" in error
    network.set_cable("up")
    job.go_on()
    assert job.read() == f"[0, 1] {[[40.0] * 3] * 4}"
    assert job.chief.wait(20) == 0
