"""The strategies' contract: replicas as processes, and one alone."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import fastdist as fd
import pytest
import torch
from digits_training import own_devices
from fastdist.errors import FastdistError, UnsupportedError
from fastdist.strategies.central import CentralParameters
from fastdist.strategies.replicated import ReplicatedStrategy
from ranks import ProcessRanks
from replica_tests import on_replicas
from strategy_buffers import BuffersContract
from strategy_contract import StrategyContract
from strategy_members import MembersContract
from strategy_metrics import MetricsContract
from strategy_modules import CompiledModules, StrategyModules
from strategy_programs import ProgramsContract
from strategy_training import TrainingContract
from strategy_variables import VariableContract
from torch import nn
from torch.nn.utils import parametrize


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
    """The same strategy in every process of a world."""

    runs_in_one_process = False

    def __init__(
        self, size: int, kind: str = "mirrored", ranks: ProcessRanks | None = None
    ) -> None:
        self._ranks = ProcessRanks(size) if ranks is None else ranks
        self._kind = kind

    def run(self, case: Callable[[fd.Strategy], Any], **options: Any) -> list[Any]:
        return self._ranks.run(run_case, cloudpickle.dumps(case), self._kind, options)

    def close(self) -> None:
        self._ranks.close()


def run_case(comm: fd.Communicator, case: bytes, kind: str, options: dict[str, Any]) -> Any:
    """In a process of `ManyProcesses`."""
    torch.set_num_threads(1)
    strategy = KINDS[kind](fd.CommunicationOptions(**options))
    assert strategy.num_replicas_in_sync == comm.world_size
    return pickle.loads(case)(strategy)


def central_apart(options: fd.CommunicationOptions) -> fd.Strategy:
    """Parameters on another device than all replicas: memory of its own stands in for it."""
    world = fd.init()
    cpu, home = torch.device("cpu"), torch.device("cpu:1")
    central = CentralParameters(home, cpu, is_owner=world.rank == 0, is_shared=False)
    return ReplicatedStrategy(cpu, world, central=central, options=options)


KINDS: dict[str, Callable[[fd.CommunicationOptions], fd.Strategy]] = {
    "mirrored": lambda options: fd.MirroredStrategy(own_devices(), options=options),
    "overlapping": lambda options: fd.MirroredStrategy(
        options=dataclasses.replace(options, overlap=True)
    ),
    "multi_worker": lambda options: fd.MultiWorkerMirroredStrategy(options=options),
    "sharded": lambda options: fd.MirroredStrategy(
        own_devices(), options=dataclasses.replace(options, shard_optimizer=True)
    ),
    "central": lambda options: fd.CentralStorageStrategy(own_devices(), options=options),
    "central_apart": central_apart,
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.cls is None:
        return
    slow = getattr(metafunc.cls, "slow_sizes", ())
    sizes = [
        *getattr(metafunc.cls, "sizes", ()),
        *(pytest.param(size, marks=pytest.mark.slow) for size in slow),
    ]
    metafunc.parametrize(
        "strategies", sizes, indirect=True, scope="class", ids=lambda n: f"replicas{n}"
    )


@pytest.fixture(scope="class")
def strategies(request: pytest.FixtureRequest) -> Iterator[Any]:
    made = request.cls.make(request.param)
    yield made
    made.close()


class Contract(
    StrategyContract,
    TrainingContract,
    MembersContract,
    VariableContract,
    MetricsContract,
    BuffersContract,
    ProgramsContract,
):
    """The whole contract."""


class TestOneDevice(Contract):
    slow_sizes = (1,)

    @staticmethod
    def make(size: int) -> OneProcess:
        return OneProcess(lambda options: fd.OneDeviceStrategy("cpu"))


class TestMirrored(Contract):
    sizes = (2,)
    slow_sizes = (3,)

    @staticmethod
    def make(size: int) -> ManyProcesses:
        return ManyProcesses(size)


class TestMirroredOverlapping(TrainingContract):
    """Gradients go while backward runs, as they would with more cores."""

    sizes = (2,)

    @staticmethod
    def make(size: int) -> ManyProcesses:
        return ManyProcesses(size, "overlapping")


class TestMultiWorkerMirrored(Contract):
    slow_sizes = (2,)

    @staticmethod
    def make(size: int) -> ManyProcesses:
        return ManyProcesses(size, "multi_worker")


class TestShardedOptimizer(TrainingContract, ProgramsContract):
    slow_sizes = (2,)

    @staticmethod
    def make(size: int) -> ManyProcesses:
        return ManyProcesses(size, "sharded")


class TestTrainingCentralStorage(TrainingContract):
    sizes = (3,)

    @staticmethod
    def make(size: int) -> ManyProcesses:
        return ManyProcesses(size, "central")


class TestCentralStorage(Contract):
    slow_sizes = (2,)
    copies_parameters = False
    make = staticmethod(TestTrainingCentralStorage.make)

    @on_replicas
    def test_out_of_sync_is_seen(self, strategy: fd.Strategy) -> None:
        """Parameters cannot be; a change by hand would be one of each replica."""
        with strategy.scope():
            model = torch.nn.Linear(2, 2)

        def change() -> None:
            with torch.no_grad():
                model.weight += 1

        with pytest.raises(FastdistError, match=r"shape \(2, 2\) was changed in place in run"):
            strategy.run(change)
        strategy.check_in_sync()

    @on_replicas
    def test_the_optimizer_steps_once(self, strategy: fd.Strategy) -> None:
        with strategy.scope():
            model = torch.nn.Linear(3, 1, bias=False)
            first = torch.optim.Adam(model.parameters(), lr=0.1)
            second = torch.optim.LBFGS(model.parameters())
        steps = []
        first.register_step_post_hook(lambda *_: steps.append(1))

        def step() -> None:
            model(torch.ones(2, 3)).sum().backward()
            first.step()

        strategy.run(step)
        is_owner = strategy.local_replica_ids == (0,)
        assert len(steps) == is_owner
        assert len(first.state) == is_owner
        with pytest.raises(ValueError, match=r"LBFGS\.step got a closure"):
            strategy.run(lambda: second.step(lambda: model(torch.ones(1, 3)).sum()))

    def test_optimizers_that_count_in_their_groups(self, strategies: Any) -> None:
        class Counted(torch.optim.SGD):
            def step(self, closure: Any = None) -> Any:
                for group in self.param_groups:
                    group["step"] = group.get("step", 0) + 1
                return super().step(closure)

        def case(strategy: fd.Strategy) -> None:
            with strategy.scope():
                model = torch.nn.Linear(2, 1)
                optimizer = Counted(model.parameters(), lr=0.1)

            def step() -> None:
                optimizer.zero_grad()
                model(torch.ones(1, 2)).sum().backward()
                optimizer.step()

            for _ in range(2):
                strategy.run(step)
            assert optimizer.param_groups[0]["step"] == 2

        strategies.run(case)

    @on_replicas
    def test_parameters_of_another_dtype(self, strategy: fd.Strategy) -> None:
        with strategy.scope():
            model = torch.nn.Linear(2, 1)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model.double()  # other memory

        def step() -> None:
            optimizer.zero_grad()
            model(torch.ones(1, 2, dtype=torch.double)).sum().backward()
            optimizer.step()

        before = model.weight.detach().clone()
        strategy.run(step)
        assert torch.allclose(model.weight, before - 0.1)
        strategy.check_in_sync()


class TestCentralStorageApart(Contract):
    slow_sizes = (2,)
    copies_parameters = False

    @staticmethod
    def make(size: int) -> ManyProcesses:
        return ManyProcesses(size, "central_apart")

    test_out_of_sync_is_seen = TestCentralStorage.test_out_of_sync_is_seen


def test_the_parameters_of_central_storage_are_one_memory() -> None:
    def case(strategy: fd.Strategy) -> tuple[float, int]:
        with strategy.scope():
            model = torch.nn.Linear(1 << 12, 1 << 10, bias=False)  # 16 MiB

        def touch() -> float:
            return float(model.weight.detach().sum())

        strategy.run(touch)
        fd.init().barrier()
        lines = Path("/proc/self/smaps").read_text().split("fastdist-central", 1)[1].splitlines()
        kib = next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
        fd.init().barrier()
        return model.weight.data_ptr() % 64, kib

    ranks = ManyProcesses(2, "central")
    try:
        found = ranks.run(case)
    finally:
        ranks.close()
    assert sum(kib for _, kib in found) == pytest.approx(16 << 10, rel=0.1)


def test_devices_that_are_not_there() -> None:
    for make in (fd.MirroredStrategy, fd.CentralStorageStrategy):
        with pytest.raises(ValueError, match="must not be empty"):
            make([])
        with pytest.raises(TypeError, match="must be a list, such as"):
            make("cpu:0")
        with pytest.raises(ValueError, match="'nonsense' is not a torch device"):
            make(["nonsense"])
        for name, ours in (("/gpu:0", "cuda:0"), ("/job:a/device:CPU:1", "cpu:1"), ("GPU", "cuda")):
            with pytest.raises(ValueError, match=f"'{name}' is not a torch device; use \"{ours}\""):
                make([name])
        for kind in ("meta", "hpu"):
            with pytest.raises(ValueError, match=f"{kind} cannot be used"):
                make([kind, kind])
        with pytest.raises(ValueError, match="None is not a torch device; write its name, such as"):
            make([None])  # type: ignore[list-item]
        with pytest.raises(TypeError, match=r"must be a list, such as .*, got 0"):
            make(0)  # type: ignore[arg-type]
    if not torch.cuda.is_available():
        said = "cuda:0 cannot be used" if torch.version.cuda else "0 is not a torch device"
        with pytest.raises(ValueError, match=f"^{said}"):
            fd.OneDeviceStrategy(0)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="cuda:0 cannot be used: this torch"):
            fd.MirroredStrategy(["cuda:0", "cuda:1"])


def test_keywords_of_tf_distribute() -> None:
    with pytest.raises(TypeError, match=r"'cross_device_ops'; use nothing in its place"):
        fd.MirroredStrategy(["cpu"], cross_device_ops=None)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"'communication_options'; use options="):
        fd.MultiWorkerMirroredStrategy(communication_options=None)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"'num_replicas'; use devices=, one for each replica"):
        fd.MirroredStrategy(num_replicas=2)  # type: ignore[arg-type]


def test_arguments_that_distribute_dataset_does_not_take() -> None:
    strategy: Any = fd.OneDeviceStrategy("cpu")
    x = torch.ones(8, 2)
    with pytest.raises(TypeError, match="the source, got 2; write global_batch_size=16"):
        strategy.distribute_dataset(x, 16)
    with pytest.raises(TypeError, match=r"the source, got 2; write several arrays as \(x, y\)"):
        strategy.distribute_dataset(x, x, global_batch_size=16)
    with pytest.raises(TypeError, match="'drop_last'; use drop_remainder="):
        strategy.distribute_dataset(x, global_batch_size=2, drop_last=True)
    with pytest.raises(TypeError, match="'batch_size'; use global_batch_size=, the examples of"):
        strategy.distribute_dataset(x, batch_size=16)
    with pytest.raises(TypeError, match=r"got None; the source holds examples, and .* the batches"):
        strategy.distribute_dataset([x, x])


class OtherInit(nn.BatchNorm2d):
    def __init__(self, channels: int) -> None:
        super().__init__(channels, eps=0.5, momentum=None)
        self.channels = channels


class WithActivation(nn.BatchNorm2d):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).relu()


class Frozen(nn.BatchNorm1d):
    def train(self, mode: bool = True) -> Frozen:
        return super().train(False)


def parametrized(layer: nn.Module) -> nn.Module:
    parametrize.register_parametrization(layer, "weight", nn.Identity())
    return layer


def test_sync_batch_norm_keeps_what_a_layer_is() -> None:
    model = nn.Sequential(OtherInit(3), nn.Sequential(nn.BatchNorm2d(3, affine=False))).eval()
    calls: list[Any] = []
    model[0].register_forward_hook(lambda *_: calls.append(1))
    x = torch.randn(2, 3, 4, 4)
    expected = model(x)
    converted = fd.nn.SyncBatchNorm.convert(model)
    assert all(isinstance(m, fd.nn.SyncBatchNorm) for m in (converted[0], converted[1][0]))
    assert torch.equal(converted(x), expected)
    assert len(calls) == 2
    assert converted[0].momentum is None
    assert converted[0].channels == 3


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (WithActivation(3), r"1\.0 is a test_strategies\.WithActivation, whose own forward"),
        (Frozen(3), r"Frozen, whose own train would be lost"),
        (parametrized(nn.BatchNorm1d(3)), "whose own weight would be lost"),
        (nn.LazyBatchNorm2d(), "LazyBatchNorm2d, whose size is not known yet"),
    ],
    ids=lambda given: type(given).__name__,
)
def test_sync_batch_norm_refuses_layers_that_do_more(layer: nn.Module, message: str) -> None:
    model = nn.Sequential(nn.BatchNorm2d(3), nn.Sequential(layer))
    with pytest.raises(UnsupportedError, match=message):
        fd.nn.SyncBatchNorm.convert(model)
    assert type(model[0]) is nn.BatchNorm2d  # nothing is half converted


class TestModulesMirrored(StrategyModules):
    sizes = (2,)
    make = staticmethod(TestMirrored.make)


class TestCompiled(CompiledModules):
    slow_sizes = (2,)
    make = staticmethod(TestMirrored.make)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"compress": "zip"}, 'compress must be None, "fp16"'),
        ({"bucket_bytes": 0}, "bucket_bytes must be positive, got 0"),
        ({"timeout_s": -1}, "timeout_s must be positive, got -1"),
        ({"overlap": "never"}, 'overlap must be True, False or "auto"'),
        ({"gradient_reduction": "max"}, 'gradient_reduction must be "mean" or "sum"'),
    ],
)
def test_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fd.CommunicationOptions(**options)
