"""The contract of the strategies in programs that start themselves, and under launchers."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import cloudpickle
import test_strategies
from ranks import RankError
from test_strategies import Contract, pytest_generate_tests, strategies  # noqa: F401

PROGRAM = Path(__file__).parent / "strategy_server.py"
LAUNCHERS = {
    "self-started": lambda replicas: [],
    "fastdist run": lambda replicas: ["-m", "fastdist", "run", "-n", str(replicas)],
    "torchrun": lambda replicas: [
        *("-m", "torch.distributed.run", "--standalone"),
        f"--nproc-per-node={replicas}",
    ],
}


class Program:
    """Replicas of a program that serves cases."""

    runs_in_one_process = False

    def __init__(self, launcher: str, kind: str, replicas: int) -> None:
        self._folder = TemporaryDirectory()
        address = f"{self._folder.name}/socket"
        words = LAUNCHERS[launcher](replicas)
        kept = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
        devices = {"REPLICAS": str(replicas)} if launcher == "self-started" else {}
        with Listener(address, "AF_UNIX") as listener:
            self._process = subprocess.Popen(
                [sys.executable, *words, str(PROGRAM), address, kind],
                env=kept | {"OMP_NUM_THREADS": "1"} | devices,
            )
            self._replicas: list[Connection] = [listener.accept() for _ in range(replicas)]

    def run(self, case: Any, **options: Any) -> list[Any]:
        for replica in self._replicas:
            replica.send((cloudpickle.dumps(case), options))
        deadline = time.monotonic() + 60
        results: list[Any] = []
        errors: dict[int, BaseException | str] = {}
        for i, replica in enumerate(self._replicas):
            if not replica.poll(max(0.0, deadline - time.monotonic())):
                errors[i] = "no answer after 60 s"
                continue
            failed, value = replica.recv()
            if failed:
                errors[i] = value
            results.append(value)
        if errors:
            raise RankError(errors)
        return results

    def close(self) -> None:
        for replica in self._replicas:
            replica.close()
        self._process.wait(20)
        self._folder.cleanup()


class TestSelfStarted(Contract):
    slow_sizes = (2, 3)

    @staticmethod
    def make(size: int) -> Program:
        return Program("self-started", "mirrored", size)


class TestSelfStartedCentral(Contract):
    slow_sizes = (2,)
    copies_parameters = False

    @staticmethod
    def make(size: int) -> Program:
        return Program("self-started", "central", size)

    test_out_of_sync_is_seen = test_strategies.TestCentralStorage.test_out_of_sync_is_seen


class TestFastdistRun(Contract):
    slow_sizes = (2,)

    @staticmethod
    def make(size: int) -> Program:
        return Program("fastdist run", "mirrored", size)


class TestTorchrun(Contract):
    slow_sizes = (2,)

    @staticmethod
    def make(size: int) -> Program:
        return Program("torchrun", "multi_worker", size)
