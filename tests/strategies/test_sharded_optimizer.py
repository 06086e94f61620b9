"""Optimizers whose states are divided among replicas: the bits of one that is not."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import itertools
import pickle
import types
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fastdist as fd
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from fastdist import Strategy
from fastdist.errors import CollectiveMismatchError, UnsupportedError
from launched import Launcher
from marks import slow
from ranks import ProcessRanks
from replica_runs import Run, ranks, run
from torch import nn
from torch.nn.parallel import DistributedDataParallel

__all__ = ["ranks", "run"]  # fixtures

STEPS = 100
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=1e-3),
    "adam": lambda params: torch.optim.Adam(params, lr=1e-2),
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-2, amsgrad=True),
    "fused": lambda params: torch.optim.Adam(params, lr=1e-2, fused=True),
    "adafactor": lambda params: torch.optim.Adafactor(params, lr=1e-2),
    "muon": lambda params: torch.optim.Muon(params, lr=1e-2),
}


class Model(nn.Module):
    """Matrices of several shapes; `bias` is False for Muon, which takes matrices alone."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Linear(12, 40, bias=bias), nn.ReLU(), nn.Linear(40, 33, bias=bias), nn.ReLU()),
            *(nn.Linear(33, 64, bias=bias), nn.ReLU(), nn.Linear(64, 5, bias=bias)),
        )
        self.unused = nn.Linear(7, 7, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layers(x)
        return out


def batches(strategy: Strategy) -> Iterator[Any]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(210, 12, generator=generator)
    y = torch.randint(5, (210,), generator=generator)
    while True:
        yield from strategy.distribute_dataset((x, y), global_batch_size=21)


def values(model: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def trained(
    strategy: Strategy, make: Callable[[Any], torch.optim.Optimizer], steps: int = STEPS
) -> tuple[list[torch.Tensor], torch.optim.Optimizer]:
    """Return the parameters after training, and the optimizer."""
    torch.manual_seed(0)
    with strategy.scope():
        model = Model(bias="Muon" not in type(make([nn.Parameter(torch.ones(2, 2))])).__name__)
        optimizer = make(model.parameters())

    def step(batch: Any) -> None:
        x, y = batch
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    for _, batch in zip(range(steps), batches(strategy), strict=False):
        strategy.run(step, args=(batch,))
    strategy.check_in_sync()
    return values(model), optimizer


def whole_strategy() -> Strategy:
    """Another strategy of the same replicas, whose optimizers are not divided."""
    return fd.MirroredStrategy()


QUICK = ("adam", "muon")


@pytest.mark.parametrize("overlap", [True, *slow(False)])
@pytest.mark.parametrize("name", [*QUICK, *slow(*sorted(OPTIMIZERS.keys() - set(QUICK)))])
def test_bits(run: Run, name: str, overlap: bool) -> None:
    def case(strategy: Strategy) -> None:
        expected, whole = trained(whole_strategy(), OPTIMIZERS[name])
        found, sharded = trained(strategy, OPTIMIZERS[name])
        for one, other in zip(expected, found, strict=True):
            assert torch.equal(one, other)
        one, other = whole.state_dict(), sharded.state_dict()
        assert one.keys() == other.keys()
        assert list(one["state"]) == list(other["state"])
        for key, state in one["state"].items():
            assert state.keys() == other["state"][key].keys()
            for what, value in state.items():
                assert torch.equal(
                    torch.as_tensor(value), torch.as_tensor(other["state"][key][what])
                )
        assert len(sharded.state) < len(whole.state) or not whole.state

    run(case, shard_optimizer=True, overlap=overlap)


def test_parts_of_the_state(run: Run) -> None:
    def case(strategy: Strategy) -> tuple[int, int]:
        torch.manual_seed(0)
        with strategy.scope():
            model = nn.Sequential(*(nn.Linear(20, 20) for _ in range(48)))
            optimizer = torch.optim.Adam(model.parameters())

        def step() -> None:
            optimizer.zero_grad()
            model(torch.ones(2, 20)).sum().backward()
            optimizer.step()

        strategy.run(step)
        own = sum(state["exp_avg"].numel() for state in optimizer.state.values())
        return own, sum(p.numel() for p in model.parameters())

    found = run(case, shard_optimizer=True)
    assert sum(own for own, _ in found) == found[0][1]
    for own, elements in found:
        assert own <= 1.05 * elements / len(found)


def test_what_people_do_with_optimizers(run: Run) -> None:
    """A scheduler, a scaler, two optimizers, frozen layers, groups added later, closures, EMA."""

    def train(strategy: Strategy) -> list[torch.Tensor]:
        torch.manual_seed(0)
        with strategy.scope():
            model = Model()
            head = nn.Linear(5, 5)
            for p in model.layers[2].parameters():
                p.requires_grad_(False)
            first = torch.optim.AdamW(
                [{"params": model.layers[:4].parameters(), "lr": 1e-2}, {"params": [], "lr": 0.5}]
            )
            second = torch.optim.SGD(model.layers[4].parameters(), lr=0.1, momentum=0.9)
            average = torch.optim.swa_utils.AveragedModel(model)
        schedule = torch.optim.lr_scheduler.ExponentialLR(first, 0.95)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=4)

        def step(batch: Any, turn: int) -> torch.Tensor:
            x, y = batch
            first.zero_grad()
            second.zero_grad()
            loss = F.cross_entropy(head(model(x)), y)
            scaler.scale(loss).backward()
            scaler.unscale_(first)
            for p in first.param_groups[0]["params"]:
                assert turn == 0 or p.grad is not None or not p.requires_grad
            scaler.step(first)
            scaler.step(second)
            scaler.update()
            schedule.step()
            return loss.detach()

        def closed(batch: Any) -> None:
            x, y = batch

            def closure() -> torch.Tensor:
                second.zero_grad()
                loss = F.cross_entropy(head(model(x)), y)
                loss.backward()
                return loss

            loss = second.step(closure)
            assert loss is not None

        for turn, batch in zip(range(20), batches(strategy), strict=False):
            if turn == 8:
                for p in model.layers[2].parameters():
                    p.requires_grad_(True)
            if turn == 12:
                first.add_param_group({"params": list(head.parameters()), "lr": 1e-3})
            if turn % 5 == 4:
                strategy.run(closed, args=(batch,))
            else:
                strategy.run(step, args=(batch, turn))
            average.update_parameters(model)
        strategy.check_in_sync()
        return [*values(model), *values(head), *values(average)]

    def case(strategy: Strategy) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            expected = train(whole_strategy())
            found = train(strategy)
        for one, other in zip(expected, found, strict=True):
            assert torch.equal(one, other)

    run(case, shard_optimizer=True)


def test_steps_in_pieces(run: Run) -> None:
    """With a parameter without elements, one that is there twice, and a step that fails midway."""

    def stepped(strategy: Strategy, kind: type[torch.optim.SGD]) -> list[float]:
        with strategy.scope():
            model = nn.ParameterList(nn.Parameter(torch.ones(4)) for _ in range(8))
            model.append(nn.Parameter(torch.ones(0)))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch's, of the one that is there twice
                optimizer = kind([*model, model[0]], lr=0.1)

        def step() -> None:
            sum(p.sum() for p in model).backward()
            with contextlib.suppress(ZeroDivisionError):
                optimizer.step()

        strategy.run(step)
        return [round(p.sum().item(), 3) for p in model]

    class Halves(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            self.param_groups[0]["lr"] /= 2
            return super().step()

    def case(strategy: Strategy) -> None:
        for kind in (torch.optim.SGD, Halves):
            assert stepped(strategy, kind) == stepped(whole_strategy(), kind)
        plain, calls = torch.optim.SGD._init_group, itertools.count()

        def fails_later(*args: Any) -> Any:
            if next(calls) == 2:
                raise ZeroDivisionError
            return plain(*args)

        torch.optim.SGD._init_group = fails_later
        try:
            sums = stepped(strategy, torch.optim.SGD)
        finally:
            torch.optim.SGD._init_group = plain
        assert set(sums) == {3.2, 3.6, 4.0, 0.0}
        strategy.check_in_sync()

    run(case, shard_optimizer=True, overlap=True)


def test_a_failed_step_leaves_the_groups_whole(run: Run) -> None:
    class Fails(torch.optim.SGD):
        fails = False

        def step(self, closure: Any = None) -> Any:
            if Fails.fails:
                raise ZeroDivisionError

    def case(strategy: Strategy) -> None:
        with strategy.scope():
            model = nn.Linear(3, 2)
            optimizer = Fails(model.parameters(), lr=0.1)

        def step() -> None:
            model(torch.ones(2, 3)).sum().backward()
            optimizer.step()

        Fails.fails = True
        with pytest.raises(ZeroDivisionError):
            strategy.run(step)
        assert len(optimizer.param_groups[0]["params"]) == 2

    run(case, shard_optimizer=True)


class Own(torch.optim.Optimizer):
    """SGD with a step of its own, that takes no closure."""

    def __init__(self, params: Any, most: float = 0.5) -> None:
        self.most = most
        super().__init__(params, {})

    def scale(self, gradients: list[torch.Tensor]) -> float:
        return self.most

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        scale = self.scale([p.grad for p in params])
        for p in params:
            p.sub_(scale * p.grad)
            p.grad = None


class ByNorm(Own):
    """Clips by the norm of all gradients, as LAMB does; the limit is an attribute."""

    def scale(self, gradients: list[torch.Tensor]) -> float:
        norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
        return min(1.0, self.most / float(norm))


class ByEstimate(Own):
    """Estimates one rate for all parameters, from the second step on, as Prodigy does."""

    rate = 0.1

    def scale(self, gradients: list[torch.Tensor]) -> float:
        before = self.rate
        self.rate = max(0.1, 1e-3 * sum(float(gradient.abs().sum()) for gradient in gradients))
        return before


class ByOrder(torch.optim.SGD):
    """Has another rate for each parameter, by its place."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for number, parameter in enumerate(group["params"]):
                parameter.data.sub_(parameter.grad, alpha=0.1 * 0.5**number)


class ByNumber(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.sub_(parameter.grad, alpha=0.1 / len(group["params"]))


class Noisy(torch.optim.SGD):
    """Samples, as SGLD does."""

    def step(self, closure: Any = None) -> None:
        super().step()
        for parameter in self.param_groups[0]["params"]:
            parameter.data.add_(torch.randn_like(parameter))


class Lookahead(torch.optim.Optimizer):
    """Steps by another optimizer, whose groups it has."""

    def __init__(self, parameters: Any) -> None:
        self.base = torch.optim.SGD(parameters, lr=0.1)
        super().__init__([{"params": []}], {})
        self.param_groups = self.base.param_groups


class WithModes(Own):
    """Has modes that change parameters, as schedule-free optimizers have."""

    def train(self) -> None: ...
    def eval(self) -> None: ...


def test_states_of_before(run: Run) -> None:
    """Those that are loaded in the scope, before it ends."""

    def case(strategy: Strategy) -> None:
        saved = trained(whole_strategy(), OPTIMIZERS["adam"], 5)[1].state_dict()
        torch.manual_seed(0)
        with strategy.scope():
            model = Model()
            optimizer = OPTIMIZERS["adam"](model.parameters())
            optimizer.load_state_dict(saved)

        def step() -> None:
            optimizer.zero_grad()
            model(torch.ones(2, 12)).sum().backward()
            optimizer.step()

        strategy.run(step)
        assert len(optimizer.state) < len(saved["state"])
        states = optimizer.state_dict()["state"]
        assert [float(state["step"]) for state in states.values()] == [6.0] * len(saved["state"])

    run(case, shard_optimizer=True)


def test_hooks_see_all_parameters(run: Run) -> None:
    def train(strategy: Strategy) -> list[torch.Tensor]:
        torch.manual_seed(0)
        with strategy.scope():
            model = Model()
            optimizer = Own(model.parameters())
        average = [p.detach().clone() for p in model.parameters()]

        def clip(optimizer: Any, *_: object) -> None:
            nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 0.1)

        def follow(optimizer: Any, *_: object) -> None:
            for mean, p in zip(average, optimizer.param_groups[0]["params"], strict=True):
                mean.lerp_(p.detach(), 0.5)
            optimizer.zero_grad()

        optimizer.register_step_pre_hook(clip)
        optimizer.register_step_post_hook(follow)

        def step(batch: Any) -> None:
            F.cross_entropy(model(batch[0]), batch[1]).backward()
            optimizer.step()

        for _, batch in zip(range(5), batches(strategy), strict=False):
            strategy.run(step, args=(batch,))
        return [*values(model), *average]

    def case(strategy: Strategy) -> None:
        for one, other in zip(train(whole_strategy()), train(strategy), strict=True):
            assert torch.equal(one, other)

    run(case, shard_optimizer=True)


def test_states_move_after_a_failure(run: Run) -> None:
    """The replicas connect anew; a rank whose states are lost would be told."""

    def case(strategy: Strategy) -> None:
        found, optimizer = [], None
        for each in (whole_strategy(), strategy):
            torch.manual_seed(0)
            with each.scope():
                model = Model()
                optimizer = OPTIMIZERS["adam"](model.parameters())

            def step(fails: bool, model: nn.Module = model, optimizer: Any = optimizer) -> None:
                optimizer.zero_grad()
                model(torch.ones(2, 12)).square().mean().backward()
                if fails:
                    raise ZeroDivisionError
                optimizer.step()

            for turn in range(6):
                if turn == 3:
                    with pytest.raises(ZeroDivisionError):
                        each.run(step, args=(True,))
                each.run(step, args=(False,))
            found.append(values(model))
        for one, other in zip(*found, strict=True):
            assert torch.equal(one, other)

    run(case, shard_optimizer=True)


def test_nothing_is_kept_alive(run: Run) -> None:
    def case(strategy: Strategy) -> None:
        def train() -> weakref.ref[torch.Tensor]:
            with strategy.scope():
                model = nn.Linear(3, 2)
                optimizer = torch.optim.Adam(model.parameters())

            def step() -> None:
                model(torch.ones(2, 3)).sum().backward()
                optimizer.step()

            strategy.run(step)
            return weakref.ref(model.weight)

        weight = train()
        gc.collect()
        assert weight() is None

    run(case, shard_optimizer=True)


def test_layouts_of_states_stay(run: Run) -> None:
    """torch's fused Adam pairs a parameter and its states in the order of memory."""

    def case(strategy: Strategy) -> None:
        with strategy.scope():
            model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 3))
            model.to(memory_format=torch.channels_last)
            optimizer = torch.optim.Adam(model.parameters(), fused=True)

        def step() -> None:
            model(torch.ones(2, 3, 8, 8)).sum().backward()
            optimizer.step()

        strategy.run(step)
        for state, p in zip(
            optimizer.state_dict()["state"].values(), model.parameters(), strict=True
        ):
            assert state["exp_avg"].stride() == p.stride()
        strategy.check_in_sync()

    run(case, shard_optimizer=True, overlap=True)


def test_copies_and_calls_of_some_replicas(run: Run) -> None:
    def case(strategy: Strategy) -> None:
        with strategy.scope():
            model = Model()
            optimizer = torch.optim.Adam(model.parameters())
        for copied in (copy.deepcopy, pickle.dumps):
            with pytest.raises(UnsupportedError, match="Adam is sharded: a copy would have this"):
                copied(optimizer)
        with pytest.raises(CollectiveMismatchError, match="different collectives"):
            optimizer.state_dict() if strategy.is_chief else strategy.check_in_sync()

    run(case, shard_optimizer=True)


def train_by_ddp(comm: fd.Communicator, folder: str) -> None:
    """In a process of `ranks`: the same bits, and states that torch alone can load."""
    store = dist.FileStore(f"{folder}/store", comm.world_size)
    dist.init_process_group("fastdist", rank=comm.rank, world_size=comm.world_size, store=store)
    try:
        found, states = [], []
        for sharded in (False, True):
            torch.manual_seed(0)
            model = DistributedDataParallel(Model(), find_unused_parameters=True)
            make = fd.ShardedOptimizer if sharded else lambda cls, *a, **k: cls(*a, **k)
            optimizer = make(torch.optim.AdamW, model.parameters(), lr=1e-2)
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3)
            generator = torch.Generator().manual_seed(comm.rank)
            for turn in range(10):
                x = torch.randn(8, 12, generator=generator)
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
                schedule.step()
                if turn == 5:
                    optimizer.load_state_dict(optimizer.state_dict())
            found.append(values(model))
            states.append(optimizer.state_dict()["state"])
        for one, other in zip(*found, strict=True):
            assert torch.equal(one, other)
        for key, state in states[0].items():
            assert all(torch.equal(state[name], states[1][key][name]) for name in state)
        experts = nn.ModuleList(nn.Linear(3, 3) for _ in range(comm.world_size))
        optimizer = fd.ShardedOptimizer(torch.optim.SGD, experts.parameters(), lr=0.1)
        experts[comm.rank](torch.ones(3)).sum().backward()
        with pytest.raises(CollectiveMismatchError, match="with gradients for parameters 2-3"):
            optimizer.step()
    finally:
        dist.destroy_process_group()


def test_under_ddp(ranks: ProcessRanks, tmp_path: Path) -> None:
    ranks.run(train_by_ddp, str(tmp_path))


# Replica 1 computes as on a processor without AVX-512, whose products of matrices round otherwise.
MIXED = """
import os, sys
if os.environ["RANK"] == "1":
    os.environ |= {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
    os.environ["MKL_ENABLE_INSTRUCTIONS"] = "AVX2"
import torch, torch.nn.functional as F
import fastdist as fd
options = fd.CommunicationOptions(shard_optimizer="sharded" in sys.argv)
strategy = fd.MirroredStrategy(options=options)
with strategy.scope():
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64, bias=False) for _ in range(4)))
    optimizer = getattr(torch.optim, sys.argv[1])(model.parameters(), lr=1e-2)
def step(batch):
    optimizer.zero_grad()
    F.cross_entropy(model(batch[0]), batch[1]).backward()
    optimizer.step()
data = torch.randn(240, 64, generator=torch.Generator().manual_seed(1)), torch.arange(240) % 10
for epoch in range(4):
    for batch in strategy.distribute_dataset(data, global_batch_size=24):
        strategy.run(step, args=(batch,))
strategy.check_in_sync()
"""


@pytest.mark.slow
@pytest.mark.parametrize("words", [["Adam"], ["AdamW"], ["Muon", "sharded"]])
def test_processors_of_two_kinds(
    launcher: Launcher, script: Callable[[str], Path], words: list[str]
) -> None:
    done = launcher.run("-n", 2, script(MIXED), *words)
    assert done.returncode == 0, done.stderr.decode()


def test_a_group_of_another_backend(tmp_path: Path) -> None:
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", rank=0, world_size=1, store=store)
    try:
        with pytest.raises(TypeError, match='needs a process group of backend "fastdist"'):
            fd.ShardedOptimizer(torch.optim.Adam, [nn.Parameter(torch.ones(2))])
    finally:
        dist.destroy_process_group()


ACROSS = [torch.optim.LBFGS, ByNorm, ByEstimate, ByOrder, ByNumber, Noisy, Lookahead, WithModes]


@pytest.mark.parametrize("make", ACROSS)
def test_optimizers_that_look_across_parameters(run: Run, make: Any) -> None:
    def case(strategy: Strategy) -> None:
        scope = strategy.scope()
        scope.__enter__()
        made = make(nn.Linear(3, 2).parameters())
        named = f"{make.__name__}.* cannot be divided"
        with pytest.raises(UnsupportedError, match=named):
            scope.__exit__(None, None, None)
        assert made

    run(case, shard_optimizer=True)


def test_a_step_that_the_program_wraps(run: Run) -> None:
    def case(strategy: Strategy) -> None:
        with strategy.scope():
            model = nn.Linear(3, 2)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            optimizer.state["program"] = {"calls": 7}  # of no parameter
        plain, calls = optimizer.step, []
        optimizer.step = lambda *given: calls.append(plain(*given))  # type: ignore[method-assign]

        def step() -> None:
            model(torch.ones(2, 3)).sum().backward()
            optimizer.step()

        strategy.run(step)
        assert len(calls) == 1
        state = optimizer.state_dict()
        assert state["state"]["program"] == {"calls": 7}
        optimizer.load_state_dict(state)
        strategy.check_in_sync()
        for before_scheduler in (True, False):
            scope = strategy.scope()
            scope.__enter__()
            other = torch.optim.SGD(nn.Linear(3, 2).parameters(), lr=0.1)
            if not before_scheduler:
                torch.optim.lr_scheduler.StepLR(other, 1)
            own = types.MethodType(functools.wraps(other.step)(lambda self: None), other)
            other.step = own  # type: ignore[method-assign]
            if before_scheduler:
                torch.optim.lr_scheduler.StepLR(other, 1)
            with pytest.raises(UnsupportedError, match="step of this SGD has been replaced"):
                scope.__exit__(None, None, None)

    run(case, shard_optimizer=True)


def test_other_strategies_refuse() -> None:
    with pytest.raises(UnsupportedError, match="one copy of the optimizers' states"):
        fd.CentralStorageStrategy(["cpu:0"], options=fd.CommunicationOptions(shard_optimizer=True))
    servers: Any = fd.ParameterServerStrategy
    with pytest.raises(TypeError, match="'options'; use MirroredStrategy or Multi"):
        servers(options=fd.CommunicationOptions(shard_optimizer=True))
