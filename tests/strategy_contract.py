"""What every strategy with replicas must do, whatever its replicas are.

A test hands a function to `strategies.run`, which calls it with a strategy once in every process.
"""

from __future__ import annotations

import copy
import functools
import gc
import io
import os
from contextlib import nullcontext
from typing import Any

import fastdist as fd
import pytest
import torch
import torch.nn.functional as F
from fastdist import PerReplica, Strategy
from fastdist.errors import FastdistError
from torch import nn


def replica_id() -> int:
    context = fd.get_replica_context()
    assert context is not None
    return context.replica_id_in_sync_group


def per_replica(strategy: Strategy, values: list[Any], counts: Any = None) -> Any:
    """Of values for all replicas, this process's."""
    own = tuple(values[i] for i in strategy.local_replica_ids)
    return PerReplica(own, counts)


def batch(strategy: Strategy, *arrays: torch.Tensor) -> tuple[Any, ...]:
    """A global batch as `distribute_dataset` gives it."""
    n = strategy.num_replicas_in_sync
    counts = tuple(len(part) for part in arrays[0].tensor_split(n))
    return tuple(per_replica(strategy, list(a.tensor_split(n)), counts) for a in arrays)


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    return torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 32)
        self.second = nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(F.relu(self.first(x)))


def train(
    strategy: Strategy, make: Any, epochs: int = 1, global_batch: int = 100, **step_options: Any
) -> list[torch.Tensor]:
    """Trains on digits; the parameters of the first local replica in the end."""
    torch.manual_seed(1)
    with strategy.scope():
        model, optimizer = make()

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad(**step_options)
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    images, labels = digits()
    for _ in range(epochs):
        for begin in range(0, len(images), global_batch):
            end = begin + global_batch
            args = batch(strategy, images[begin:end], labels[begin:end])
            loss = strategy.reduce("mean", strategy.run(step, args=args))
            assert torch.isfinite(loss)
    strategy.check_in_sync()
    return [parameter.detach().clone() for parameter in model.parameters()]


@functools.cache
def plain(make: Any, epochs: int = 1, global_batch: int = 100) -> list[torch.Tensor]:
    torch.manual_seed(1)
    model, optimizer = make()
    images, labels = digits()
    for _ in range(epochs):
        for begin in range(0, len(images), global_batch):
            optimizer.zero_grad()
            part = slice(begin, begin + global_batch)
            F.cross_entropy(model(images[part]), labels[part]).backward()
            optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


def require_close(got: list[torch.Tensor], wanted: list[torch.Tensor], atol: float) -> None:
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=atol)


def train_on_dataset(strategy: Strategy, epochs: int) -> list[torch.Tensor]:
    """By `distribute_dataset`, shuffled."""
    torch.manual_seed(1)
    with strategy.scope():
        model, optimizer = sgd()
    batches = strategy.distribute_dataset(digits(), global_batch_size=100, shuffle=True, seed=3)

    def step(batch: Any) -> torch.Tensor:
        x, y = batch
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    for _ in range(epochs):
        for one in batches:
            strategy.reduce("mean", strategy.run(step, args=(one,)))
    strategy.check_in_sync()
    return [parameter.detach().clone() for parameter in model.parameters()]


@functools.cache
def trained_on_one_device(epochs: int) -> list[torch.Tensor]:
    return train_on_dataset(fd.OneDeviceStrategy("cpu"), epochs)


def sgd() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Net()
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def adam() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Net()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


class StrategyContract:
    copies_parameters = True
    """Bound to a kind of replicas by a subclass of a few lines."""

    # --- reduce, gather, contexts ----------------------------------------------------------------

    def test_reduce_of_one_on_each(self, strategies: Any) -> None:
        def case(strategy: Strategy) -> None:
            n = strategy.num_replicas_in_sync
            value = strategy.run(lambda: torch.tensor(1.0))
            for _ in range(2):
                assert strategy.reduce("sum", value) == n
                assert strategy.reduce("mean", value) == 1
            with strategy.scope():
                assert strategy.reduce("sum", value) == n
                assert strategy.reduce("mean", value) == 1
                assert strategy.reduce("max", strategy.run(replica_id)) == n - 1
                assert strategy.reduce("mean", strategy.run(replica_id)) == (n - 1) / 2

        strategies.run(case)

    def test_reduce_along_an_axis(self, strategies: Any) -> None:
        def case(strategy: Strategy) -> None:
            n = strategy.num_replicas_in_sync
            value = strategy.run(lambda: torch.tensor([1.0, 2.0]))
            assert strategy.reduce("mean", value, axis=0) == 1.5
            assert strategy.reduce("sum", value, axis=0) == 3 * n
            ragged = strategy.run(lambda: torch.arange(replica_id() + 1.0))
            rows = [float(x) for r in range(n) for x in range(r + 1)]
            expected = pytest.approx(sum(rows) / len(rows))
            assert float(strategy.reduce("mean", ragged, axis=0)) == expected

        strategies.run(case)

    def test_structures(self, strategies: Any) -> None:
        def case(strategy: Strategy) -> None:
            result = strategy.run(lambda: {"a": torch.ones(2), "b": (replica_id(), [1.0])})
            total = strategy.reduce("sum", result)
            n = strategy.num_replicas_in_sync
            assert total["a"].tolist() == [n, n]
            assert total["b"][0] == n * (n - 1) // 2
            assert total["b"][1] == [n]

        strategies.run(case)

    def test_all_reduce_and_its_gradient(self, strategies: Any) -> None:
        def case(strategy: Strategy) -> None:
            n = strategy.num_replicas_in_sync

            def step() -> torch.Tensor:
                context = fd.get_replica_context()
                assert context is not None
                x = torch.tensor([1.0, 2.0], requires_grad=True)
                total = context.all_reduce("sum", x)
                assert total.tolist() == [n, 2 * n]
                total.backward(torch.tensor([1.0, replica_id()]))
                assert x.grad is not None
                assert x.grad.tolist() == [n, n * (n - 1) / 2]
                mean = context.all_reduce("mean", {"r": replica_id()})
                assert mean["r"] == (n - 1) / 2
                return total

            strategy.run(step)

        strategies.run(case)

    def test_all_gather_and_its_gradient(self, strategies: Any) -> None:
        def case(strategy: Strategy) -> None:
            n = strategy.num_replicas_in_sync

            def step() -> None:
                context = fd.get_replica_context()
                assert context is not None
                own = replica_id()
                x = torch.full((2, own + 1), float(own), requires_grad=True)
                joined = context.all_gather(x, axis=1)
                assert joined[0].tolist() == [float(r) for r in range(n) for _ in range(r + 1)]
                weights = torch.arange(joined.numel(), dtype=torch.float32).reshape(joined.shape)
                joined.backward(weights)
                begin = own * (own + 1) // 2
                assert x.grad is not None
                assert x.grad.tolist() == (n * weights[:, begin : begin + own + 1]).tolist()

            strategy.run(step)

        strategies.run(case)

    def test_gather(self, strategies: Any) -> None:
        def case(strategy: Strategy) -> None:
            n = strategy.num_replicas_in_sync
            value = strategy.run(lambda: torch.full((replica_id() + 1, 1), float(replica_id())))
            rows = strategy.gather(value, axis=0)
            assert rows.flatten().tolist() == [float(r) for r in range(n) for _ in range(r + 1)]
            with pytest.raises(ValueError, match="at least one dimension"):
                strategy.gather(strategy.run(lambda: torch.tensor(1.0)), axis=0)
            if n > 1:
                ragged = strategy.run(lambda: torch.ones(2, replica_id() + 1))
                with pytest.raises(ValueError, match=r"\(2, 1\)"):
                    strategy.gather(ragged, axis=0)

        strategies.run(case)

    def test_reduce_to_a_device(self, strategies: Any) -> None:
        def case(strategy: Strategy) -> None:
            n = strategy.num_replicas_in_sync
            one = strategy.run(lambda: torch.tensor(1.0))
            assert strategy.reduce_to("sum", one, "cpu") == n
            pairs = [(one, "cpu"), (strategy.run(lambda: torch.ones(2)), torch.zeros(1))]
            scalar, vector = strategy.batch_reduce_to("sum", pairs)
            assert scalar == n
            assert vector.tolist() == [n, n]

        strategies.run(case)

    def test_update_each_component(self, strategies: Any) -> None:
        copies_parameters = self.copies_parameters

        def case(strategy: Strategy) -> None:
            with strategy.scope():
                model = nn.Linear(2, 1)
            amount = strategy.distribute_values_from_function(lambda context: 3.0)

            def put(component: torch.Tensor, value: float) -> int:
                component.fill_(value)
                return id(component)

            ids = strategy.update(model.weight, put, args=(amount,))
            copies = len(strategy.devices) if copies_parameters else 1
            assert len(set(strategy.local_results(ids))) == copies
            strategy.check_in_sync()
            for total in strategy.local_results(strategy.run(lambda: model.weight.sum().item())):
                assert total == 6.0

        strategies.run(case)

    def test_contexts(self, strategies: Any) -> None:
        def case(strategy: Strategy) -> None:
            assert not fd.has_strategy()
            assert fd.get_strategy() is not None
            assert fd.get_replica_context() is not None
            assert not fd.in_cross_replica_context()
            with strategy.scope(), strategy.scope():
                assert fd.get_strategy() is strategy
                assert fd.has_strategy()
                assert fd.in_cross_replica_context()
                assert fd.get_replica_context() is None

                def inside() -> None:
                    assert fd.get_strategy() is strategy
                    assert not fd.in_cross_replica_context()

                strategy.run(inside)
                with pytest.raises(RuntimeError, match="Mixing"), fd.DefaultStrategy().scope():
                    pass
                with pytest.raises(RuntimeError, match="Mixing"):
                    fd.DefaultStrategy().run(inside)
                assert fd.get_strategy() is strategy
            ids = strategy.run(replica_id)
            assert strategy.local_results(ids) == strategy.local_replica_ids

        strategies.run(case)

    def test_run_is_strict(self, strategies: Any) -> None:
        def case(strategy: Strategy) -> None:
            with pytest.raises(ValueError, match="tuple or list, got Tensor"):
                strategy.run(lambda x: x, args=torch.ones(1))
            with pytest.raises(RuntimeError, match="inside run"):
                strategy.run(lambda: strategy.run(lambda: None))
            with pytest.raises(RuntimeError, match="inside run"):
                strategy.run(lambda: strategy.scope().__enter__())
            with pytest.raises(ValueError, match="op must be"):
                strategy.reduce("average", 1.0)
            assert strategy.reduce("sum", strategy.run(lambda: 1.0)) == (
                strategy.num_replicas_in_sync
            )

        strategies.run(case)

    def test_an_exception_in_one_replica(self, strategies: Any) -> None:
        def case(strategy: Strategy) -> None:
            last = strategy.num_replicas_in_sync - 1

            def failing() -> None:
                if replica_id() == last:
                    raise KeyError("lost")

            if last in strategy.local_replica_ids:
                with pytest.raises(KeyError, match="lost") as caught:
                    strategy.run(failing)
                assert any(entry.name == "failing" for entry in caught.traceback)
            else:
                strategy.run(failing)
            assert strategy.reduce("sum", strategy.run(lambda: 1.0)) == last + 1

        strategies.run(case)

    def test_merge_call(self, strategies: Any) -> None:
        def case(strategy: Strategy) -> None:
            calls = []

            def merged(given: Strategy, value: Any, scale: float) -> Any:
                assert fd.in_cross_replica_context()
                assert given is strategy
                calls.append(1)
                return given.reduce("sum", value) * scale

            def step() -> torch.Tensor:
                context = fd.get_replica_context()
                assert context is not None
                result: torch.Tensor = context.merge_call(
                    merged, args=(torch.tensor(float(replica_id())),), kwargs={"scale": 2.0}
                )
                assert fd.get_replica_context() is context
                return result

            n = strategy.num_replicas_in_sync
            for result in strategy.local_results(strategy.run(step)):
                assert result == n * (n - 1)
            assert len(calls) == 1

            def run_again(given: Strategy) -> None:
                given.run(lambda: None)

            if len(strategy.devices) > 1:
                with pytest.raises(RuntimeError, match="run was called while the strategy runs"):
                    strategy.run(lambda: fd.get_replica_context().merge_call(run_again))

        strategies.run(case)

    def test_distribute_values_from_function(self, strategies: Any) -> None:
        def case(strategy: Strategy) -> None:
            value = strategy.distribute_values_from_function(
                lambda context: 10 * context.replica_id_in_sync_group
            )
            doubled = strategy.run(lambda x: 2 * x, args=(value,))
            expected = tuple(20 * i for i in strategy.local_replica_ids)
            assert strategy.local_results(doubled) == expected

        strategies.run(case)

    # --- training --------------------------------------------------------------------------------

    def test_summed_gradients(self, strategies: Any) -> None:
        def case(strategy: Strategy) -> None:
            n = strategy.num_replicas_in_sync
            with strategy.scope():
                model = nn.Linear(1, 1, bias=False)
                model.weight.data.zero_()
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

            def step() -> None:
                for _ in range(2):  # accumulated over two backwards
                    (model.weight * (replica_id() + 1.0)).sum().backward()
                optimizer.step()

            strategy.run(step)
            assert model.weight.item() == pytest.approx(-0.1 * 2 * n * (n + 1) / 2)

        strategies.run(case, gradient_reduction="sum")

    @pytest.mark.parametrize("implementation", ["hierarchical_copy", "reduce_to_one_device"])
    def test_implementations_of_the_reduction(self, strategies: Any, implementation: str) -> None:
        def case(strategy: Strategy) -> None:
            require_close(train(strategy, sgd), plain(sgd), 4e-5)

            def fail() -> None:
                raise KeyError("nothing")

            if len(strategy.devices) == strategy.num_replicas_in_sync:
                with pytest.raises(KeyError):
                    strategy.run(fail)
                require_close(train(strategy, sgd), plain(sgd), 4e-5)

        strategies.run(case, implementation=implementation)

    @pytest.mark.parametrize("make", [sgd, adam])
    def test_digits_train_as_on_one_device(self, strategies: Any, make: Any) -> None:
        def case(strategy: Strategy) -> None:
            got = train(strategy, make, epochs=3)
            require_close(got, plain(make, epochs=3), 4e-5)

        strategies.run(case)

    def test_a_shuffled_dataset_trains_as_on_one_device(self, strategies: Any) -> None:
        def case(strategy: Strategy) -> None:
            require_close(train_on_dataset(strategy, 2), trained_on_one_device(2), 4e-5)

        strategies.run(case)

    def test_batches_are_cut_among_replicas(self, strategies: Any) -> None:
        def case(strategy: Strategy) -> None:
            n = strategy.num_replicas_in_sync
            sizes = []
            for one in strategy.distribute_dataset(torch.arange(15), global_batch_size=4):
                parts = strategy.gather(strategy.run(lambda x: torch.tensor([len(x)]), args=(one,)))
                sizes.append(parts.tolist())
            wanted = [len(part) for part in torch.arange(3).tensor_split(n)]
            assert sizes[-1] == wanted
            assert [sum(row) for row in sizes] == [4, 4, 4, 3]

        strategies.run(case)

    def test_datasets_from_function(self, strategies: Any) -> None:
        def case(strategy: Strategy) -> None:
            calls = []

            def make(context: Any) -> Any:
                calls.append(context)
                size = context.get_per_replica_batch_size(12)
                worker = context.input_pipeline_id
                replicas = context.num_replicas_in_sync // context.num_input_pipelines
                rows = torch.arange(5 * size * replicas) + 1000 * worker
                return rows.split(size)

            batches = strategy.distribute_datasets_from_function(make)
            rows = [strategy.gather(one) for one in batches]
            assert len(rows) == 5
            assert {len(row) for row in rows} == {12}
            assert len(calls) == 1

        strategies.run(case)

    def test_replicas_without_examples(self, strategies: Any) -> None:
        def case(strategy: Strategy) -> None:
            got = train(strategy, sgd, global_batch=898)  # one example for the last batch
            require_close(got, plain(sgd, global_batch=898), 4e-5)
            torch.manual_seed(3)
            with strategy.scope():
                model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
            before = [buffer.clone() for buffer in model.buffers()]
            n = strategy.num_replicas_in_sync
            counts = (4,) + (0,) * (n - 1)
            x = per_replica(strategy, [torch.randn(4, 3)] + [torch.ones(0, 3)] * (n - 1), counts)

            def step(x: torch.Tensor) -> torch.Tensor:
                loss = F.mse_loss(model(x), torch.zeros(len(x), 2))
                loss.backward()
                return loss.detach()

            loss = strategy.reduce("mean", strategy.run(step, args=(x,)))
            assert torch.isfinite(loss)
            for parameter in model.parameters():
                assert parameter.grad is not None
                assert torch.isfinite(parameter.grad).all()
            assert not torch.equal(before[0], model[1].running_mean)
            strategy.check_in_sync()

        strategies.run(case)

    def test_batch_norm_keeps_the_mean_over_replicas(self, strategies: Any) -> None:
        def case(strategy: Strategy) -> None:
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

        strategies.run(case)

    def test_sync_batch_norm_sees_the_global_batch(self, strategies: Any) -> None:
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

        def case(strategy: Strategy) -> None:
            wanted = losses(fd.OneDeviceStrategy("cpu"), nn.BatchNorm2d)
            require_close(losses(strategy, fd.nn.SyncBatchNorm), wanted, 1e-5)
            converted = fd.nn.SyncBatchNorm.convert(nn.Sequential(nn.BatchNorm1d(4)))
            assert isinstance(converted[0], fd.nn.SyncBatchNorm)

        strategies.run(case)

    def test_average_and_regularization_loss(self, strategies: Any) -> None:
        def case(strategy: Strategy) -> None:
            per_example = torch.arange(7.0)
            (one,) = batch(strategy, per_example)
            average = strategy.run(fd.nn.compute_average_loss, args=(one,))
            assert strategy.reduce("sum", average) == pytest.approx(3.0)
            shares = strategy.run(fd.nn.scale_regularization_loss, args=(torch.tensor(2.0),))
            assert strategy.reduce("sum", shares) == pytest.approx(2.0)

        strategies.run(case)

    # --- modules and optimizers ------------------------------------------------------------------

    def test_the_model_stays_the_users_own(self, strategies: Any) -> None:
        def case(strategy: Strategy) -> None:
            with strategy.scope():
                model, optimizer = adam()
            assert isinstance(model, Net)
            assert type(model).__name__ == "Net"
            twin = copy.deepcopy(model)
            assert type(twin) is Net
            buffer = io.BytesIO()
            torch.save(model.state_dict(), buffer)
            buffer.seek(0)
            Net().load_state_dict(torch.load(buffer))
            assert not hasattr(twin, "_fastdist_twins")
            model.eval()
            assert strategy.local_results(strategy.run(lambda: model.training)) == (
                (False,) * len(strategy.devices)
            )
            state = optimizer.state_dict()
            optimizer.load_state_dict(state)

        strategies.run(case)

    def test_load_state_dict_reaches_all_replicas(self, strategies: Any) -> None:
        def case(strategy: Strategy) -> None:
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

        strategies.run(case)

    def test_accumulation_clipping_unused_and_frozen(self, strategies: Any) -> None:
        def make() -> Any:
            model = Net()
            model.spare = nn.Linear(2, 2)  # type: ignore[assignment]
            model.first.bias.requires_grad_(False)
            return model, torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1)

        def steps(strategy: Strategy) -> list[torch.Tensor]:
            torch.manual_seed(2)
            with strategy.scope():
                model, optimizer = make()
            images, labels = digits()

            def step(halves: Any) -> None:
                optimizer.zero_grad()
                with strategy.no_sync():
                    (F.cross_entropy(model(halves[0][0]), halves[0][1]) / 2).backward()
                (F.cross_entropy(model(halves[1][0]), halves[1][1]) / 2).backward()
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                assert model.spare.weight.grad is None
                assert model.first.bias.grad is None
                optimizer.step()

            for begin in range(0, 480, 240):
                halves = [
                    batch(strategy, images[b : b + 120], labels[b : b + 120])
                    for b in (begin, begin + 120)
                ]
                strategy.run(step, args=(halves,))
            strategy.check_in_sync()
            return [parameter.detach().clone() for parameter in model.parameters()]

        def case(strategy: Strategy) -> None:
            require_close(steps(strategy), steps(fd.OneDeviceStrategy("cpu")), 4e-5)

        strategies.run(case)

    @pytest.mark.parametrize("sizes", [(7, 2, 1), (8, 5, 7), (1, 12, 4)])
    def test_accumulation_over_batches_that_are_cut_unevenly(
        self, strategies: Any, sizes: tuple[int, ...]
    ) -> None:
        def gradients(strategy: Strategy) -> list[torch.Tensor]:
            torch.manual_seed(2)
            with strategy.scope():
                model = nn.Sequential(nn.Embedding(20, 3, sparse=True), nn.Linear(3, 1))
            ids = torch.randint(0, 20, (64,))

            def backward(ids: torch.Tensor) -> None:
                model(ids).square().mean().backward()

            begin = 0
            for place, size in enumerate(sizes):
                part = batch(strategy, ids[begin : begin + size])
                begin += size
                last = place == len(sizes) - 1
                with nullcontext() if last else strategy.no_sync():
                    strategy.run(lambda part: backward(part[0]), (part,))
            return [p.grad.to_dense() for p in model.parameters() if p.grad is not None]

        def case(strategy: Strategy) -> None:
            require_close(gradients(strategy), gradients(fd.OneDeviceStrategy("cpu")), 1e-6)

        strategies.run(case)

    def test_parameters_used_on_some_replicas_only(self, strategies: Any) -> None:
        def case(strategy: Strategy) -> None:
            n = strategy.num_replicas_in_sync
            with strategy.scope():
                model = nn.ModuleList(nn.Linear(1, 1, bias=False) for _ in range(n))

            def step() -> list[float]:
                (model[replica_id()].weight * (replica_id() + 1)).sum().backward()
                return [layer.weight.grad.item() for layer in model]

            for grads in zip(*map(strategy.local_results, strategy.run(step)), strict=True):
                assert grads == pytest.approx([(r + 1) / n for r in range(n)])

        strategies.run(case)

    def test_merge_call_changes_all_replicas_alike(self, strategies: Any) -> None:
        def case(strategy: Strategy) -> None:
            n = strategy.num_replicas_in_sync
            with strategy.scope():
                model = nn.Linear(1, 1, bias=False)
                model.register_buffer("count", torch.zeros(1))
                optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
                variable = fd.Variable(0.0)

            def change(_: Strategy) -> None:
                variable.assign(3.0)

            def step() -> list[float]:
                optimizer.zero_grad()
                model.count.fill_(replica_id())
                with strategy.no_sync():
                    (model(torch.ones(1, 1)) * (1.0 + replica_id())).sum().backward()
                fd.get_replica_context().merge_call(change)
                kept = float(model.count)
                (model(torch.ones(1, 1)) * 0).sum().backward()
                before = model.weight.item()
                if len(strategy.devices) > 1:
                    fd.get_replica_context().merge_call(lambda _: optimizer.step())
                else:
                    optimizer.step()
                return [kept, float(variable.value), before - model.weight.item()]

            got = [strategy.local_results(value) for value in strategy.run(step)]
            for replica, (kept, value, moved) in zip(
                strategy.local_replica_ids, zip(*got, strict=True), strict=True
            ):
                assert kept == replica
                assert value == 3
                assert moved == pytest.approx((n + 1) / 2)

        strategies.run(case)

    def test_schedulers_made_outside(self, strategies: Any) -> None:
        """They work outside `run`; where replicas share them they would count too often in it."""

        def case(strategy: Strategy) -> None:
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
            if len(strategy.devices) > 1:
                with pytest.raises(FastdistError, match=r"lr=0\.\d+ on replica 1.*in.*scope"):
                    strategy.run(step, (True,))
            else:
                assert strategy.local_results(strategy.run(step, (True,))) == (0.25,)

        strategies.run(case)

    def test_a_module_of_another_strategy(self, strategies: Any) -> None:
        def case(strategy: Strategy) -> None:
            model = nn.Linear(2, 1)
            other = fd.MirroredStrategy(["cpu:0", "cpu:1"]) if in_one_process() else None
            if other is None or strategy.num_replicas_in_sync == 1:
                return
            other.mirror(model)
            with pytest.raises(ValueError, match="weight belongs to another strategy"):
                strategy.mirror(model)
            strategy.mirror(copy.deepcopy(model))
            del other
            strategy.mirror(model)
            strategy.run(lambda: model(torch.ones(1, 2)).sum().backward())
            strategy.check_in_sync()

        def in_one_process() -> bool:
            return "WORLD_SIZE" not in os.environ

        strategies.run(case)

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

    def test_batch_norm_outside_run(self, strategies: Any) -> None:
        def case(strategy: Strategy) -> None:
            with strategy.scope():
                model = nn.BatchNorm1d(2)
            model(torch.full((4, 2), 50.0))
            means = strategy.run(lambda: model.running_mean.tolist())
            for mean in means:
                assert set(strategy.local_results(mean)) == {5.0}
            strategy.check_in_sync()

        strategies.run(case)

    def test_unfrozen_in_run(self, strategies: Any) -> None:
        def case(strategy: Strategy) -> None:
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

        strategies.run(case)

    def test_gradients_kept_back_for_one_of_several_models(self, strategies: Any) -> None:
        def case(strategy: Strategy) -> None:
            n = strategy.num_replicas_in_sync
            with strategy.scope():
                first, second = nn.Linear(1, 1), nn.Linear(1, 1)

            def step() -> float:
                with strategy.no_sync():
                    first(torch.full((1, 1), replica_id() + 1.0)).sum().backward()
                second(torch.ones(1, 1)).sum().backward()
                assert first.weight.grad is not None
                return first.weight.grad.item()

            for grad in strategy.local_results(strategy.run(step)):
                assert grad == pytest.approx((n + 1) / 2)

        strategies.run(case)

    def test_one_of_several_models(self, strategies: Any) -> None:
        def case(strategy: Strategy) -> None:
            n = strategy.num_replicas_in_sync
            torch.manual_seed(0)
            with strategy.scope():
                first, second = nn.Linear(3, 2), nn.Linear(2, 1)
                table = nn.Embedding(4, 3, sparse=True)

            def step(which: str) -> None:
                for parameter in (*first.parameters(), *second.parameters(), table.weight):
                    parameter.grad = None
                x = torch.full((2, 3), replica_id() + 1.0)
                if which == "first":
                    first(x).sum().backward()
                elif which == "second":
                    second(first(x).detach()).sum().backward()
                elif which == "last one only":
                    part = second.bias if replica_id() == n - 1 else first.bias * 0
                    part.sum().backward()
                else:
                    second(first(table(torch.tensor([1, 1])))).sum().backward()

            def has_gradients() -> list[bool]:
                tensors = (first.weight, second.weight, second.bias, table.weight)
                return [tensor.grad is not None for tensor in tensors]

            for which, expected in (
                ("first", [True, False, False, False]),
                ("second", [False, True, True, False]),
                ("both", [True, True, True, True]),
                ("last one only", [False, False, True, False]),
                ("first", [True, False, False, False]),
            ):

                def run(which: str = which) -> list[bool]:
                    step(which)
                    return has_gradients()

                for got in zip(*map(strategy.local_results, strategy.run(run)), strict=True):
                    assert list(got) == expected, which
                if which == "first":
                    strategy.run(lambda: None)
                    assert first.weight.grad[0, 0] == pytest.approx(n + 1.0)

        strategies.run(case)

    def test_each_replica_has_its_own_random_stream(self, strategies: Any) -> None:
        def case(strategy: Strategy) -> list[list[float]]:
            n = strategy.num_replicas_in_sync
            runs = []
            for _ in range(2):
                torch.manual_seed(5)
                drawn = strategy.run(lambda: torch.cat([torch.rand(2), F.dropout(torch.ones(4))]))
                outside = torch.rand(1)
                rows = strategy.gather(drawn).reshape(n, -1)
                assert len({tuple(row.tolist()) for row in rows}) == n
                runs.append([*rows.tolist(), outside.tolist()])
            assert runs[0] == runs[1]
            return runs[0]

        results = strategies.run(case)
        assert all(result == results[0] for result in results)

    @pytest.mark.parametrize("first_forward", ["inside", "outside"])
    def test_lazy_modules(self, strategies: Any, first_forward: str) -> None:
        def case(strategy: Strategy) -> None:
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

        strategies.run(case)

    def test_gradients_outside_run(self, strategies: Any) -> None:
        def train(strategy: Strategy) -> list[torch.Tensor]:
            torch.manual_seed(4)
            with strategy.scope():
                model = Net()
                optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

            def backward(x: torch.Tensor, y: torch.Tensor) -> None:
                F.cross_entropy(model(x), y).backward()

            images, labels = digits()
            for i in range(4):
                optimizer.zero_grad(set_to_none=i % 2 == 0)
                for part in (slice(0, 50), slice(50, 90)):  # adds up
                    strategy.run(backward, args=batch(strategy, images[part], labels[part]))
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
            strategy.run(lambda: None)
            strategy.check_in_sync()
            return [parameter.detach().clone() for parameter in model.parameters()]

        def case(strategy: Strategy) -> None:
            require_close(train(strategy), train(fd.OneDeviceStrategy("cpu")), 1e-5)

        strategies.run(case)

    def test_sparse_gradients(self, strategies: Any) -> None:
        def train(strategy: Strategy) -> list[torch.Tensor]:
            torch.manual_seed(6)
            with strategy.scope():
                model = nn.Embedding(20, 3, sparse=True)
                optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

            def step(rows: torch.Tensor) -> None:
                optimizer.zero_grad()
                model(rows).square().sum(1).mean().backward()
                assert model.weight.grad.is_sparse
                optimizer.step()

            for rows in ([1, 2, 3, 1, 7, 9, 1], [4, 4, 4], [5, 6, 7, 8, 9, 10, 11, 12]):
                strategy.run(step, args=batch(strategy, torch.tensor(rows)))
            strategy.check_in_sync()
            return [model.weight.detach().clone()]

        def case(strategy: Strategy) -> None:
            require_close(train(strategy), train(fd.OneDeviceStrategy("cpu")), 1e-6)

        strategies.run(case)

    def test_an_optimizer_made_outside(self, strategies: Any) -> None:
        def case(strategy: Strategy) -> None:
            with strategy.scope():
                model = Net()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            if strategy.num_replicas_in_sync > 1:
                with pytest.raises(ValueError, match="made outside the scope"):
                    strategy.run(optimizer.step)
            elsewhere = nn.Linear(1, 1)
            free = torch.optim.SGD(elsewhere.parameters(), lr=0.1)
            strategy.run(free.step)

        strategies.run(case)

    def test_schedulers_and_scalers(self, strategies: Any) -> None:
        def case(strategy: Strategy) -> None:
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

        strategies.run(case)

    # --- bad input -------------------------------------------------------------------------------

    def test_out_of_sync_is_seen(self, strategies: Any) -> None:
        def case(strategy: Strategy) -> None:
            with strategy.scope():
                model = Net()

            def change() -> None:
                if replica_id() == 1:
                    with torch.no_grad():
                        model.second.bias[3] += 1

            strategy.run(change)
            if strategy.num_replicas_in_sync == 1:
                strategy.check_in_sync()
                return
            with pytest.raises(FastdistError, match=r"second.bias differs on replicas \[1\]"):
                strategy.check_in_sync()

        strategies.run(case)

    def test_batches_of_different_structure(self, strategies: Any) -> None:
        def case(strategy: Strategy) -> None:
            if len(strategy.devices) == 1:
                return
            with pytest.raises(ValueError, match="different structures"):
                strategy.run(lambda: {"a": 1} if replica_id() % 2 else {"b": 1})
            assert strategy.reduce("sum", strategy.run(lambda: 1.0)) == (
                strategy.num_replicas_in_sync
            )

        strategies.run(case)
