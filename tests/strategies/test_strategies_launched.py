"""The contract of the strategies in programs that start themselves, and under launchers."""

from __future__ import annotations

import os
import subprocess
import sys
from multiprocessing.connection import Listener
from tempfile import TemporaryDirectory

import test_strategies
from paths import TESTS
from ranks import ProcessRanks
from strategy_contract import StrategyContract
from strategy_programs import ProgramsContract
from strategy_training import TrainingContract
from test_strategies import (  # noqa: F401
    ManyProcesses,
    pytest_generate_tests,
    strategies,
)

PROGRAM = TESTS / "strategies" / "support" / "strategy_server.py"
LAUNCHERS = {
    "self-started": lambda replicas: [],
    "fastdist run": lambda replicas: ["-m", "fastdist", "run", "-n", str(replicas)],
    "torchrun": lambda replicas: [
        *("-m", "torch.distributed.run", "--standalone"),
        f"--nproc-per-node={replicas}",
    ],
}


class LaunchedRanks(ProcessRanks):
    """The replicas of a program that a launcher starts, or that starts them itself."""

    _end_s = 20.0

    def __init__(self, size: int, launcher: str, kind: str) -> None:
        super().__init__(size)
        self._launcher = launcher
        self._kind = kind

    def start(self) -> None:
        words = LAUNCHERS[self._launcher](self.size)
        kept = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
        devices = {"REPLICAS": str(self.size)} if self._launcher == "self-started" else {}
        with TemporaryDirectory() as folder, Listener(f"{folder}/socket", "AF_UNIX") as listener:
            process = subprocess.Popen(
                [sys.executable, *words, str(PROGRAM), str(listener.address), self._kind],
                env=kept | {"OMP_NUM_THREADS": "1"} | devices,
            )
            self._pipes = [listener.accept() for _ in range(self.size)]
        self._processes = [process] * self.size


def launched(size: int, launcher: str, kind: str) -> ManyProcesses:
    return ManyProcesses(size, kind, LaunchedRanks(size, launcher, kind))


class Started(StrategyContract, ProgramsContract):
    """The parts of the contract that a launcher might change."""


class TestSelfStarted(Started, TrainingContract):
    slow_sizes = (2,)

    @staticmethod
    def make(size: int) -> ManyProcesses:
        return launched(size, "self-started", "mirrored")


class TestSelfStartedCentral(Started):
    slow_sizes = (2,)
    copies_parameters = False

    @staticmethod
    def make(size: int) -> ManyProcesses:
        return launched(size, "self-started", "central")

    test_out_of_sync_is_seen = test_strategies.TestCentralStorage.test_out_of_sync_is_seen


class TestThreeSelfStarted(StrategyContract):
    slow_sizes = (3,)
    make = staticmethod(TestSelfStarted.make)


class TestFastdistRun(Started):
    slow_sizes = (2,)

    @staticmethod
    def make(size: int) -> ManyProcesses:
        return launched(size, "fastdist run", "mirrored")


class TestTorchrun(Started):
    slow_sizes = (2,)

    @staticmethod
    def make(size: int) -> ManyProcesses:
        return launched(size, "torchrun", "multi_worker")
