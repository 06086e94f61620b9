"""The strategies' contract: replicas as threads, as processes, and one alone."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from typing import Any

import cloudpickle
import fastdist as fd
import pytest
import torch
from fastdist.errors import ClusterConfigError, FastdistError
from fastdist.strategies.communicators import thread_links
from fastdist.strategies.replicated import LinkedStrategy
from ranks import ProcessRanks
from strategy_contract import StrategyContract
from strategy_members import MembersContract
from strategy_metrics import MetricsContract
from strategy_modules import CompiledModules, StrategyModules
from strategy_training import TrainingContract
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
        return self._ranks.run(run_case, cloudpickle.dumps(case), self._local, options)

    def close(self) -> None:
        self._ranks.close()


def run_case(comm: fd.Communicator, case: bytes, local: int, options: dict[str, Any]) -> Any:
    """In a process of `ManyProcesses`."""
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
    if metafunc.cls is None:
        return
    sizes = metafunc.cls.sizes
    metafunc.parametrize(
        "strategies", sizes, indirect=True, scope="class", ids=[f"replicas{n}" for n in sizes]
    )


@pytest.fixture(scope="class")
def strategies(request: pytest.FixtureRequest) -> Iterator[Any]:
    made = request.cls.make(request.param)
    yield made
    made.close()


class Contract(
    StrategyContract, TrainingContract, MembersContract, VariableContract, MetricsContract
):
    """All of it."""


class TestOneDevice(Contract):
    sizes = (1,)

    @staticmethod
    def make(size: int) -> OneProcess:
        return OneProcess(lambda options: fd.OneDeviceStrategy("cpu"))


class TestMirroredByThreads(Contract):
    sizes = (2, 3)

    @staticmethod
    def make(size: int) -> OneProcess:
        devices = [f"cpu:{i}" for i in range(size)]
        return OneProcess(lambda options: fd.MirroredStrategy(devices, options=options))


class TestMirroredByProcesses(Contract):
    sizes = (2, 3)

    @staticmethod
    def make(size: int) -> ManyProcesses:
        return ManyProcesses(size)


class TestMultiWorkerMirrored(Contract):
    sizes = (2,)

    @staticmethod
    def make(size: int) -> ManyProcesses:
        return ManyProcesses(2, local=size)


class TestCentralStorage(Contract):
    sizes = (1, 3)
    copies_parameters = False

    @staticmethod
    def make(size: int) -> OneProcess:
        devices = [f"cpu:{i}" for i in range(size)]
        return OneProcess(lambda options: fd.CentralStorageStrategy(devices, options=options))

    def test_out_of_sync_is_seen(self, strategies: Any) -> None:
        """Parameters cannot be."""

        def case(strategy: fd.Strategy) -> None:
            with strategy.scope():
                model = torch.nn.Linear(2, 2)
            pointers = strategy.run(lambda: model.weight.data_ptr())
            assert set(strategy.local_results(pointers)) == {model.weight.data_ptr()}

        strategies.run(case)

    def test_the_optimizer_steps_once(self, strategies: Any) -> None:
        def case(strategy: fd.Strategy) -> None:
            n = strategy.num_replicas_in_sync
            with strategy.scope():
                model = torch.nn.Linear(3, 1, bias=False)
                first = torch.optim.Adam(model.parameters(), lr=0.1)
                second = torch.optim.LBFGS(model.parameters())
            steps = []
            first.register_step_post_hook(lambda *_: steps.append(1))

            def step(i: int) -> None:
                model(torch.ones(2, 3)).sum().backward()
                (first if i % n == 0 else second).step()

            strategy.run(step, args=(0,))
            assert len(steps) == 1
            assert len(first.state) == 1
            assert all(not twin.state for twin in twins_of(first))
            if n > 1:
                ids = strategy.distribute_values_from_function(
                    lambda context: context.replica_id_in_sync_group
                )
                with pytest.raises(FastdistError, match="step different optimizers"):
                    strategy.run(step, args=(ids,))
                with pytest.raises(ValueError, match=r"LBFGS\.step got a closure"):
                    strategy.run(lambda: second.step(lambda: model(torch.ones(1, 3)).sum()))

        strategies.run(case)


def twins_of(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    found: list[torch.optim.Optimizer] = optimizer.__dict__.get("_fastdist_twins", [])
    return found


def test_central_storage_is_for_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("RANK", 0), ("WORLD_SIZE", 2), ("LOCAL_RANK", 0), ("LOCAL_WORLD_SIZE", 2)):
        monkeypatch.setenv(name, str(value))
    with pytest.raises(ClusterConfigError, match=r"one process; .* started 2"):
        fd.CentralStorageStrategy()
    with pytest.raises(ValueError, match="must not be empty"):
        fd.CentralStorageStrategy([])


class TestCentralStorageApart(Contract):
    """Parameters on another device than all replicas: memory of their own stands in for it."""

    sizes = (2,)
    copies_parameters = False

    @staticmethod
    def make(size: int) -> OneProcess:
        cpu, other = torch.device("cpu"), torch.device("cpu:1")
        return OneProcess(
            lambda options: LinkedStrategy(
                [cpu] * size,
                lambda: thread_links(size, options),
                parameter_device=other,
                options=options,
            )
        )

    @pytest.mark.parametrize("first_forward", ["outside"])
    def test_lazy_modules(self, strategies: Any, first_forward: str) -> None:
        super().test_lazy_modules(strategies, first_forward)

    def test_lazy_modules_first_called_inside(self, strategies: Any) -> None:
        with pytest.raises(FastdistError, match="call it once outside run first"):
            super().test_lazy_modules(strategies, "inside")


class TestModulesByThreads(StrategyModules):
    sizes = (3,)
    make = staticmethod(TestMirroredByThreads.make)


class TestModulesByProcesses(StrategyModules):
    sizes = (2,)
    make = staticmethod(TestMirroredByProcesses.make)


class TestModulesMultiWorker(StrategyModules):
    sizes = (2,)
    make = staticmethod(TestMultiWorkerMirrored.make)


class TestCompiledByThreads(CompiledModules):
    sizes = (2,)
    make = staticmethod(TestMirroredByThreads.make)


class TestCompiledMultiWorker(CompiledModules):
    sizes = (1,)
    make = staticmethod(TestMultiWorkerMirrored.make)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"implementation": "ring"}, 'implementation must be one of "auto", "all_reduce"'),
        ({"implementation": "reduce_to_one_device", "compress": "fp16"}, "compress needs another"),
        ({"compress": "zip"}, 'compress must be None, "fp16"'),
        ({"bucket_bytes": 0}, "bucket_bytes must be positive, got 0"),
        ({"timeout_s": -1}, "timeout_s must be positive, got -1"),
        ({"gradient_reduction": "max"}, 'gradient_reduction must be "mean" or "sum"'),
    ],
)
def test_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fd.CommunicationOptions(**options)
