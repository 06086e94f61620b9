"""Tests of the modules and optimizers of a strategy, for every strategy.

A test hands a function to `strategies.run`, which calls it with a strategy once in every process.
"""

from __future__ import annotations

import copy
import gc
import io
from typing import Any

import fastdist as fd
import pytest
import torch
import torch.nn.functional as F
from digits_training import (
    Net,
    adam,
    batch,
    own_devices,
    replica_id,
    require_close,
)
from fastdist import Strategy
from fastdist.errors import FastdistError
from replica_tests import on_replicas
from torch import nn


class MembersContract:
    """Modules and optimizers. Subclasses choose the strategy."""

    @on_replicas
    def test_batch_norm_keeps_the_mean_over_replicas(self, strategy: Strategy) -> None:
        with strategy.scope():
            model = nn.Sequential(nn.BatchNorm1d(1))
        n = strategy.num_replicas_in_sync
        rows = torch.arange(4.0 * n).reshape(-1, 1)
        (x,) = batch(strategy, rows)

        def step(x: torch.Tensor) -> None:
            model(x).sum().backward()

        strategy.run(step, args=(x,))
        means = [float(part.mean()) for part in rows.tensor_split(n)]
        expected = 0.1 * sum(means) / n
        assert model[0].running_mean.item() == pytest.approx(expected, rel=1e-6)
        assert model.state_dict()["0.running_mean"].item() == pytest.approx(expected, rel=1e-6)

    @on_replicas
    def test_sync_batch_norm_sees_the_global_batch(self, strategy: Strategy) -> None:
        def losses(strategy: Strategy, layer: Any) -> list[torch.Tensor]:
            torch.manual_seed(4)
            with strategy.scope():
                model = nn.Sequential(nn.Conv2d(1, 3, 2), layer(3), nn.Flatten(), nn.Linear(27, 2))
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            torch.manual_seed(5)
            images, targets = torch.randn(10, 1, 4, 4), torch.randn(10, 2)

            def step(x: torch.Tensor, y: torch.Tensor) -> None:
                optimizer.zero_grad()
                F.mse_loss(model(x), y).backward()
                optimizer.step()

            for _ in range(3):
                strategy.run(step, args=batch(strategy, images, targets))
            strategy.check_in_sync()
            return [value.detach().clone().float() for value in model.state_dict().values()]

        wanted = losses(fd.OneDeviceStrategy("cpu"), nn.BatchNorm2d)
        require_close(losses(strategy, fd.nn.SyncBatchNorm), wanted, 1e-5)
        converted = fd.nn.SyncBatchNorm.convert(nn.Sequential(nn.BatchNorm1d(4)))
        assert isinstance(converted[0], fd.nn.SyncBatchNorm)

    @on_replicas
    def test_sync_batch_norm_needs_two_values(self, strategy: Strategy) -> None:
        """The layer raises, as torch's does on one device."""
        with strategy.scope():
            layer = fd.nn.SyncBatchNorm(2)
        with pytest.raises(Exception, match="xpected more than 1 value per channel"):
            strategy.run(layer, args=batch(strategy, torch.ones(1, 2)))
        strategy.run(layer, args=batch(strategy, torch.ones(1, 2, 3)))

    @on_replicas
    def test_the_model_stays_the_users_own(self, strategy: Strategy) -> None:
        with strategy.scope():
            model, optimizer = adam()
        assert type(model) is Net
        assert type(optimizer) is torch.optim.AdamW
        assert type(copy.deepcopy(model)) is Net
        buffer = io.BytesIO()
        torch.save(model.state_dict(), buffer)
        buffer.seek(0)
        Net().load_state_dict(torch.load(buffer))
        model.eval()
        assert strategy.local_results(strategy.run(lambda: model.training)) == (
            (False,) * len(strategy.devices)
        )
        state = optimizer.state_dict()
        optimizer.load_state_dict(state)

    @on_replicas
    def test_load_state_dict_reaches_all_replicas(self, strategy: Strategy) -> None:
        torch.manual_seed(7)
        source = Net()
        with strategy.scope():
            model = Net()
        model.load_state_dict(source.state_dict())
        strategy.check_in_sync()

        def weight() -> torch.Tensor:
            return model.first.weight.detach().clone()

        for got in strategy.local_results(strategy.run(weight)):
            assert torch.equal(got, source.first.weight)

    @on_replicas
    def test_parameters_used_on_some_replicas_only(self, strategy: Strategy) -> None:
        n = strategy.num_replicas_in_sync
        with strategy.scope():
            model = nn.ModuleList(nn.Linear(1, 1, bias=False) for _ in range(n))

        def step() -> list[float]:
            (model[replica_id()].weight * (replica_id() + 1)).sum().backward()
            return [layer.weight.grad.item() for layer in model]

        for grads in zip(*map(strategy.local_results, strategy.run(step)), strict=True):
            assert grads == pytest.approx([(r + 1) / n for r in range(n)])

    @on_replicas
    def test_merge_call_changes_all_replicas_alike(self, strategy: Strategy) -> None:
        n = strategy.num_replicas_in_sync
        with strategy.scope():
            model = nn.Linear(1, 1, bias=False)
            model.register_buffer("running", torch.zeros(1))
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
            variable = fd.Variable(0.0)

        def change(_: Strategy) -> None:
            variable.assign(3.0)

        def step() -> list[float]:
            optimizer.zero_grad()
            model.running.fill_(replica_id())
            with strategy.no_sync():
                (model(torch.ones(1, 1)) * (1.0 + replica_id())).sum().backward()
            fd.get_replica_context().merge_call(change)
            kept = float(model.running)
            (model(torch.ones(1, 1)) * 0).sum().backward()
            before = model.weight.item()
            optimizer.step()
            return [kept, float(variable.value), before - model.weight.item()]

        got = [strategy.local_results(value) for value in strategy.run(step)]
        for replica, (kept, value, moved) in zip(
            strategy.local_replica_ids, zip(*got, strict=True), strict=True
        ):
            assert kept == replica
            assert value == 3
            assert moved == pytest.approx((n + 1) / 2)

    @on_replicas
    def test_schedulers_made_outside(self, strategy: Strategy) -> None:
        with strategy.scope():
            model = nn.Linear(2, 1)
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5**epoch)

        def step(count: bool) -> float:
            optimizer.zero_grad()
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            if count:
                scheduler.step()
            return float(optimizer.param_groups[0]["lr"])

        strategy.run(step, (False,))
        scheduler.step()
        assert set(strategy.local_results(strategy.run(step, (False,)))) == {0.5}
        assert strategy.local_results(strategy.run(step, (True,))) == (0.25,)

    @on_replicas
    def test_a_module_of_another_strategy(self, strategy: Strategy) -> None:
        model = nn.Linear(2, 1)
        if strategy.num_replicas_in_sync == 1:
            return
        other: Any = fd.MirroredStrategy(own_devices())
        other.mirror(model)
        with pytest.raises(ValueError, match="weight belongs to another strategy"):
            strategy.mirror(model)
        strategy.mirror(copy.deepcopy(model))
        del other
        strategy.mirror(model)
        strategy.run(lambda: model(torch.ones(1, 2)).sum().backward())
        strategy.check_in_sync()

    def test_strategies_are_not_kept_alive(self, strategies: Any) -> None:
        def case(strategy: Strategy) -> None:
            with strategy.scope():
                model = Net()
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
                variable = fd.Variable(1)

            def step() -> None:
                optimizer.zero_grad()
                model(torch.ones(2, 64)).sum().backward()
                variable.assign_add(1)
                optimizer.step()

            strategy.run(step)

        def count() -> int:
            gc.collect()
            return sum(type(thing) is nn.Parameter for thing in gc.get_objects())

        strategies.run(case)
        if strategies.runs_in_one_process:
            before = count()
            strategies.run(case)
            assert count() <= before

    @on_replicas
    def test_batch_norm_outside_run(self, strategy: Strategy) -> None:
        with strategy.scope():
            model = nn.BatchNorm1d(2)
        model(torch.full((4, 2), 50.0))
        means = strategy.run(lambda: model.running_mean.tolist())
        for mean in means:
            assert set(strategy.local_results(mean)) == {5.0}
        strategy.check_in_sync()

    @on_replicas
    def test_unfrozen_in_run(self, strategy: Strategy) -> None:
        with strategy.scope():
            model = nn.Linear(2, 1).requires_grad_(False)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step() -> None:
            model.requires_grad_(True)
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()

        if strategy.num_replicas_in_sync == 1:
            strategy.run(step)
            return
        with pytest.raises(FastdistError, match="weight was unfrozen in the middle of run"):
            strategy.run(step)

    @pytest.mark.parametrize("first_forward", ["inside", "outside"])
    @on_replicas
    def test_lazy_modules(self, strategy: Strategy, first_forward: str) -> None:
        torch.manual_seed(strategy.local_replica_ids[0])
        with strategy.scope():
            single = nn.LazyLinear(4)
            model = nn.Sequential(nn.LazyLinear(8), nn.ReLU(), nn.LazyLinear(2))
            parameters = [*single.parameters(), *model.parameters()]
            optimizer = torch.optim.SGD(parameters, lr=0.1)
        if first_forward == "outside":
            model(single(torch.ones(2, 3)))

        def step(x: torch.Tensor) -> None:
            optimizer.zero_grad()
            model(single(x)).square().mean().backward()
            optimizer.step()

        for _ in range(3):
            strategy.run(step, args=batch(strategy, torch.randn(8, 3)))
            strategy.check_in_sync()
        assert type(single).__name__ == "Linear"

    @on_replicas
    def test_an_optimizer_made_outside(self, strategy: Strategy) -> None:
        with strategy.scope():
            model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if strategy.num_replicas_in_sync > 1:
            with pytest.raises(ValueError, match="made outside the scope"):
                strategy.run(optimizer.step)
        elsewhere = nn.Linear(1, 1)
        free = torch.optim.SGD(elsewhere.parameters(), lr=0.1)
        strategy.run(free.step)
        if strategy.num_replicas_in_sync > 1:
            with pytest.raises(ValueError, match="made outside the scope, so every replica"):
                strategy.run(free.step)

        def of_its_own() -> None:
            x = torch.zeros(2, requires_grad=True)
            inner = torch.optim.SGD([x], lr=0.1)
            x.sum().backward()
            inner.step()

        for _ in range(3):
            strategy.run(of_its_own)

    @on_replicas
    def test_schedulers_and_scalers(self, strategy: Strategy) -> None:
        with strategy.scope():
            model = Net()
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
            scaler = torch.amp.GradScaler("cpu", init_scale=4.0)

        def step(x: torch.Tensor) -> float:
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = model(x).float().pow(2).mean()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
            return float(optimizer.param_groups[0]["lr"])

        for i in range(2):
            rates = strategy.run(step, args=(torch.ones(4, 64),))
            for rate in strategy.local_results(rates):
                assert rate == 0.5 ** (i + 1)
        scheduler.step()
        assert optimizer.param_groups[0]["lr"] == 0.125
        strategy.check_in_sync()

    @on_replicas
    def test_out_of_sync_is_seen(self, strategy: Strategy) -> None:
        with strategy.scope():
            model = Net()

        def change() -> None:
            if replica_id() == 1:
                model.second.bias.data[3] += 1  # which runs do not see

        strategy.run(change)
        if strategy.num_replicas_in_sync == 1:
            strategy.check_in_sync()
            return
        with pytest.raises(FastdistError, match=r"second.bias differs on replicas \[1\]"):
            strategy.check_in_sync()
