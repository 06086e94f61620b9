"""A parameter-server job: the test is the chief, the other tasks are processes."""

import json
import os
import signal
import socket
import subprocess
from collections.abc import Iterable
from typing import Any

import fastdist as fd
from fastdist.cluster import ClusterSpec, SimpleClusterResolver
from fastdist.cluster.address import reserve_port
from fork_server import python
from launched import wait_until

_TASK = "import fastdist as fd; fd.ParameterServerStrategy()"


class PsCluster:
    """Tasks that serve until they are killed, or until a coordinator ends the job."""

    def __init__(self, workers: int, servers: int) -> None:
        self._code = _TASK
        self._ports: list[socket.socket] = []

        def addresses(count: int) -> list[str]:
            held = [reserve_port() for _ in range(count)]
            self._ports += [holder for holder, _ in held]
            return [f"127.0.0.1:{port}" for _, port in held]

        self.spec = {"chief": addresses(1), "worker": addresses(workers), "ps": addresses(servers)}
        self.tasks: dict[tuple[str, int], subprocess.Popen[bytes]] = {}
        for index in range(servers):
            self.start("ps", index)
        for index in range(workers):
            self.start("worker", index)

    def start(self, job: str, index: int) -> None:
        """Start or restart a task."""
        config = {"cluster": self.spec, "task": {"type": job, "index": index}}
        environment = {
            **os.environ,
            "TF_CONFIG": json.dumps(config),
        }
        self.tasks[job, index] = python("-c", self._code, env=environment)

    def kill(self, job: str, index: int) -> None:
        """Kill a task with SIGKILL."""
        task = self.tasks[job, index]
        task.send_signal(signal.SIGKILL)
        task.wait(10)

    def strategy(self, *args: Any, **kwargs: Any) -> Any:
        """Create a strategy for the chief; servers drop the values of the previous one."""
        resolver = SimpleClusterResolver(ClusterSpec(self.spec), "chief", 0)
        return fd.ParameterServerStrategy(resolver, *args, **kwargs)

    def coordinator(self, strategy: Any, **kwargs: Any) -> Any:
        """Create a coordinator, and wait for all its workers."""
        coordinator = fd.ClusterCoordinator(strategy, **kwargs)
        wait_until(lambda: len(coordinator.workers) == len(self.spec["worker"]))
        return coordinator

    def close(self) -> None:
        """End all tasks."""
        end_all(self.tasks.values(), self._ports)


def end_all(tasks: Iterable["subprocess.Popen[bytes]"], ports: Iterable[socket.socket]) -> None:
    """Kill tasks, and release their reserved ports."""
    started = list(tasks)
    for task in started:
        task.kill()
    for task in started:
        task.wait(10)
    for holder in ports:
        holder.close()
