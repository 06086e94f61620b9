"""Programs for training give the same under every strategy as on one device."""

from __future__ import annotations

import functools
import warnings
from contextlib import nullcontext
from typing import Any

import fastdist as fd
import programs_with_modules  # noqa: F401  (both register programs)
import programs_with_optimizers  # noqa: F401
import pytest
import torch
import torch.nn.functional as F
from digits_training import require_close
from fastdist import Strategy
from fastdist.errors import FastdistError
from replica_tests import on_replicas
from torch import nn
from training_programs import PROGRAMS, Net, Program, finish, made, simple, steps


@functools.cache
def on_one_device(program: Program) -> list[torch.Tensor]:
    return program(fd.OneDeviceStrategy("cpu"))


class StrategyModules:
    """Programs for training. Subclasses choose the strategy."""

    @pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
    @on_replicas
    def test_trains_as_on_one_device(self, strategy: Strategy, program: Program) -> None:
        require_close(program(strategy), on_one_device(program), 4e-5)

    @on_replicas
    def test_a_step_in_the_middle_of_backward(self, strategy: Strategy) -> None:
        model, optimizer = made(strategy)

        def apply(parameter: torch.Tensor) -> None:
            optimizer.step()

        model.first.weight.register_post_accumulate_grad_hook(apply)
        with pytest.raises(FastdistError, match=r"SGD.step\(\) was called during backward"):
            simple(strategy, model, optimizer)

    @on_replicas
    def test_parameters_that_are_in_no_module(self, strategy: Strategy) -> None:
        model, _ = made(strategy)
        with strategy.scope():
            scale = nn.Parameter(torch.ones(3))
            optimizer = torch.optim.SGD([*model.parameters(), scale], lr=0.1)
        with pytest.raises(ValueError, match=r"shape \(3,\) that is in none of the strategy's"):
            simple(strategy, model, optimizer)

    @on_replicas
    def test_backward_outside_run(self, strategy: Strategy) -> None:
        model, optimizer = made(strategy)
        loss = model(torch.ones(1, 6)).sum()
        grads = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
        message = r'strategy\.run\(train_step.*init_process_group\("fastdist"\)'
        for where in (nullcontext(), strategy.scope(), strategy.no_sync()):
            with where, pytest.raises(RuntimeError, match=message):
                loss.backward(retain_graph=True)
        optimizer.zero_grad()
        merged = model(torch.ones(1, 6)).sum()
        strategy.run(
            lambda: fd.get_replica_context().merge_call(lambda strategy: merged.backward())
        )
        assert torch.equal(model.second.bias.grad, grads[3])
        optimizer.zero_grad()
        simple(strategy, model, optimizer)
        strategy.check_in_sync()

    def test_batches_that_are_not_divided(self, strategies: Any) -> None:
        def warned(strategy: Strategy, batches: list[Any]) -> list[str]:
            model, _ = made(strategy)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                for batch in batches:
                    strategy.run(lambda batch: model(batch["x"]).mean().backward(), (batch,))
            return [str(warning.message) for warning in caught]

        def case(strategy: Strategy) -> list[str]:
            own = strategy.local_replica_ids[0]
            rows = torch.arange(48.0).reshape(8, 6)
            alike = [{"x": rows + i} for i in range(5)]
            for other in (
                [{"x": rows}] * 5,
                [{"x": rows + own + 2 * i} for i in range(5)],
                list(
                    strategy.distribute_dataset([{"x": row} for row in rows], global_batch_size=2)
                ),
            ):
                assert warned(type(strategy)(), other) == []
            return warned(strategy, alike)

        chief, *others = strategies.run(case)
        assert len(chief) == 1
        assert "run got the same tensors on all replicas in its first 3 runs" in chief[0]
        assert others == [[]] * len(others)

    @on_replicas
    def test_replicas_are_alike_after_a_failure(self, strategy: Strategy) -> None:
        model, optimizer = made(strategy)

        def step(x: torch.Tensor, y: torch.Tensor) -> None:
            F.mse_loss(model(x), y).backward()
            raise KeyError("before the step")

        with pytest.raises(KeyError):
            next(steps(strategy, step))
        simple(strategy, model, optimizer)
        strategy.check_in_sync()

    @on_replicas
    def test_nothing_of_torch_stays_replaced(self, strategy: Strategy) -> None:
        names = [
            (torch.random, "default_generator"),
            (torch.autograd, "_engine_run_backward"),
            (nn.Module, "__setstate__"),
            (torch.optim.SGD, "__init__"),
            (torch.optim.Optimizer, "__init__"),
        ]
        before = [getattr(*name) for name in names]
        model, optimizer = made(strategy)
        simple(strategy, model, optimizer)
        assert all(getattr(*name) is was for name, was in zip(names, before, strict=True))


class CompiledModules:
    """torch.compile takes seconds: bound to few kinds of replicas."""

    @pytest.mark.timeout(120)
    @pytest.mark.parametrize("compiled", ["model", "loss", "step"])
    @on_replicas
    def test_compiled(self, strategy: Strategy, compiled: str) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # those of dynamo about torch
            wanted = train_compiled(fd.OneDeviceStrategy("cpu"), "nothing")
            require_close(train_compiled(strategy, compiled), wanted, 4e-5)

    @pytest.mark.timeout(120)
    @on_replicas
    def test_compiled_functions_draw_as_others_do(self, strategy: Strategy) -> None:
        def drawn(strategy: Strategy, compiled: bool) -> list[torch.Tensor]:
            torch.compiler.reset()
            torch.manual_seed(3)
            with strategy.scope():
                model = nn.Sequential(nn.Linear(2, 50), nn.Dropout(0.5))
            forward = torch.compile(model, backend="aot_eager") if compiled else model
            rows = [strategy.gather(strategy.run(forward, (torch.ones(1, 2),))) for _ in range(2)]
            return [*rows, torch.rand(1)]

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            require_close(drawn(strategy, True), drawn(strategy, False), 1e-6)


def train_compiled(strategy: Strategy, compiled: str) -> list[torch.Tensor]:
    torch.compiler.reset()
    compile_ = functools.partial(torch.compile, backend="aot_eager")
    torch.manual_seed(1)
    with strategy.scope():
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    called = compile_(model) if compiled == "model" else model

    def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(called(x), y)

    reached = compile_(loss_of) if compiled == "loss" else loss_of

    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        optimizer.zero_grad()
        loss = reached(x, y)
        loss.backward()
        optimizer.step()
        return fd.get_replica_context().all_reduce("sum", loss.detach())

    for _ in steps(strategy, compile_(step) if compiled == "step" else step):
        pass
    return finish(strategy, model)
