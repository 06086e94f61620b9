"""Starts examples as jobs: as a user does, or with forks in place of new processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fastdist.cli.tasks import Task, rank_tasks, role_tasks
from fastdist.cluster.address import reserved_ports
from fork_server import python
from paths import ROOT

LIMIT_S = 120


@dataclass(frozen=True)
class Start:
    """A way to start an example.

    Attributes:
        is_forked: whether each process is a fork, with the environment that `fastdist run` gives.
        epochs: of the training.
    """

    is_forked: bool
    epochs: int

    @property
    def forked(self) -> Start:
        """The same training in forks, to compare with."""
        return Start(True, self.epochs)

    def ranks(self, script: str, *options: str, count: int = 1) -> str:
        """Run a job of equal ranks; return its output."""
        if count == 1:
            return self._wait_for([self._python(script, *options)])[0]
        if not self.is_forked:
            return self._launch("-n", str(count), script, *options)
        return "".join(self._wait_for(self._fork(rank_tasks(count, {}), script, *options)))

    def roles(self, workers: int, servers: int, script: str, *options: str) -> str:
        """Run a job with parameter servers; return the chief's output."""
        if not self.is_forked:
            roles = ("--workers", str(workers), "--ps", str(servers))
            return self._launch(*roles, script, *options)
        with reserved_ports(1 + workers + servers) as ports:
            tasks = role_tasks(workers, servers, False, ports, "", {})
            chief, *others = self._fork(tasks, script, *options)
            try:
                return self._wait_for([chief])[0]
            finally:
                for task in others:
                    task.kill()
                    task.communicate()

    def kill_roles(
        self, workers: int, servers: int, script: str, *options: str, after: str
    ) -> None:
        """Launch a job with parameter servers, and kill it when its chief has printed a text."""
        roles = ("--workers", str(workers), "--ps", str(servers))
        process = self._start(*roles, script, *options)
        end = threading.Timer(LIMIT_S, process.kill)
        end.start()
        try:
            assert any(after in line for line in process.stdout), process.stderr.read()
        finally:
            end.cancel()
            process.kill()
            process.communicate()

    def tf_config(self, cluster: dict[str, list[str]], script: str, *options: str) -> list[str]:
        """Run a worker for each address of a cluster; return their outputs."""
        tasks = [
            {"cluster": cluster, "task": {"type": "worker", "index": index}}
            for index in range(len(cluster["worker"]))
        ]
        return self._wait_for(
            [self._python(script, *options, TF_CONFIG=json.dumps(task)) for task in tasks]
        )

    def _launch(self, *command: str) -> str:
        return self._wait_for([self._start(*command)])[0]

    def _start(self, *command: str) -> Any:
        return subprocess.Popen(
            [sys.executable, "-m", "fastdist", "run", "--no-prefix", *command],
            **self._options({}),
        )

    def _fork(self, tasks: Sequence[Task], script: str, *options: str) -> list[Any]:
        return [python(script, *options, **self._options(task.environment)) for task in tasks]

    def _python(self, script: str, *options: str, **environment: str) -> Any:
        popen_options = self._options(environment)
        if self.is_forked:
            return python(script, *options, **popen_options)
        return subprocess.Popen([sys.executable, script, *options], **popen_options)

    def _options(self, environment: Any) -> dict[str, Any]:
        env = os.environ | {"OMP_NUM_THREADS": "1"} | environment  # replicas share few cores
        env.pop("PYTEST_CURRENT_TEST", None)  # strategies start no replicas in a test
        pipe = subprocess.PIPE
        return {"env": env, "cwd": ROOT, "stdout": pipe, "stderr": pipe, "text": True}

    def _wait_for(self, processes: Sequence[Any]) -> list[str]:
        try:
            written = [process.communicate(timeout=LIMIT_S) for process in processes]
        finally:
            for process in processes:
                process.kill()
        errors = "".join(errors for _, errors in written)
        assert [process.returncode for process in processes] == [0] * len(processes), errors
        return [output for output, _ in written]
