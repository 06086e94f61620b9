"""The strategies' contract: replicas as threads, as processes, and one alone."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from typing import Any

import cloudpickle
import fastdist as fd
import pytest
import torch
from ranks import ProcessRanks
from strategy_contract import StrategyContract
from strategy_variables import VariableContract


class OneProcess:
    """A strategy made in this process."""

    runs_in_one_process = True

    def __init__(self, make: Callable[[fd.CommunicationOptions], fd.Strategy]) -> None:
        self._make = make

    def run(self, case: Callable[[fd.Strategy], Any], **options: Any) -> list[Any]:
        return [case(self._make(fd.CommunicationOptions(**options)))]

    def close(self) -> None:
        """Nothing outlives a case."""


class ManyProcesses:
    """The same strategy in every process of a world, with so many replicas in each."""

    runs_in_one_process = False

    def __init__(self, size: int, local: int = 0) -> None:
        self._ranks = ProcessRanks(size)
        self._local = local

    def run(self, case: Callable[[fd.Strategy], Any], **options: Any) -> list[Any]:
        return self._ranks.run(_run_case, cloudpickle.dumps(case), self._local, options)

    def close(self) -> None:
        self._ranks.close()


def _run_case(comm: fd.Communicator, case: bytes, local: int, options: dict[str, Any]) -> Any:
    torch.set_num_threads(1)
    chosen = fd.CommunicationOptions(**options)
    strategy: fd.Strategy
    if local == 0:
        strategy = fd.MirroredStrategy(options=chosen)
    else:
        strategy = fd.MultiWorkerMirroredStrategy(devices=["cpu"] * local, options=chosen)
    assert strategy.num_replicas_in_sync == comm.world_size * max(1, local)
    return pickle.loads(case)(strategy)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    assert metafunc.cls is not None
    sizes = metafunc.cls.sizes
    metafunc.parametrize(
        "strategies", sizes, indirect=True, scope="class", ids=[f"replicas{n}" for n in sizes]
    )


@pytest.fixture(scope="class")
def strategies(request: pytest.FixtureRequest) -> Iterator[Any]:
    made = request.cls.make(request.param)
    yield made
    made.close()


class Contract(StrategyContract, VariableContract):
    """All of it."""


class TestOneDevice(Contract):
    sizes = (1,)

    @staticmethod
    def make(size: int) -> OneProcess:
        return OneProcess(lambda options: fd.OneDeviceStrategy("cpu"))


class TestMirroredByThreads(Contract):
    sizes = (1, 2, 3, 4)

    @staticmethod
    def make(size: int) -> OneProcess:
        devices = [f"cpu:{i}" for i in range(size)]
        return OneProcess(lambda options: fd.MirroredStrategy(devices, options=options))


class TestMirroredByProcesses(Contract):
    sizes = (2, 3, 4)

    @staticmethod
    def make(size: int) -> ManyProcesses:
        return ManyProcesses(size)


class TestMultiWorkerMirrored(Contract):
    sizes = (1, 2)

    @staticmethod
    def make(size: int) -> ManyProcesses:
        return ManyProcesses(2, local=size)
