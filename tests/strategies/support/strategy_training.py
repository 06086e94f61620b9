"""Tests of training, for every strategy.

A test hands a function to `strategies.run`, which calls it with a strategy once in every process.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import fastdist as fd
import pytest
import torch
import torch.nn.functional as F
from digits_training import (
    Net,
    adam,
    batch,
    digits,
    per_replica,
    plain,
    replica_id,
    require_close,
    sgd,
    train,
    train_on_dataset,
    trained_on_one_device,
)
from fastdist import Strategy
from fastdist.errors import FastdistError
from replica_tests import on_replicas
from torch import nn


class TrainingContract:
    """Gradients, batches and random numbers, bound as the contract."""

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

    def test_a_summed_gradient_that_was_assigned(self, strategies: Any) -> None:
        """Not counted once per replica: zeros and changes in place are right, else an error."""

        def case(strategy: Strategy) -> None:
            n = strategy.num_replicas_in_sync
            with strategy.scope():
                model = nn.Linear(2, 1, bias=False)

            def backward() -> None:
                model.weight.sum().backward()

            def summed() -> float:
                assert model.weight.grad is not None
                return model.weight.grad[0, 0].item()

            model.weight.grad = torch.zeros(1, 2)  # as a view of one flat gradient
            strategy.run(backward)
            assert summed() == n
            model.weight.grad.mul_(0.5)
            strategy.run(backward)
            assert summed() == n + 0.5 * n
            model.weight.grad = model.weight.grad * 0.5
            if n == 1:
                return
            with pytest.raises(FastdistError, match="the gradient of weight was assigned since"):
                strategy.run(backward)
            model.weight.grad = None
            strategy.run(backward)
            assert summed() == n

        strategies.run(case, gradient_reduction="sum")

    @on_replicas
    def test_trains_after_a_failed_run(self, strategy: Strategy) -> None:
        require_close(train(strategy, sgd), plain(sgd), 4e-5)

        def fail() -> None:
            raise KeyError("nothing")

        if len(strategy.devices) == strategy.num_replicas_in_sync:
            with pytest.raises(KeyError):
                strategy.run(fail)
            require_close(train(strategy, sgd), plain(sgd), 4e-5)

    @pytest.mark.parametrize("make", [sgd, adam])
    @on_replicas
    def test_digits_train_as_on_one_device(self, strategy: Strategy, make: Any) -> None:
        got = train(strategy, make, epochs=3)
        require_close(got, plain(make, epochs=3), 4e-5)

    @on_replicas
    def test_a_shuffled_dataset_trains_as_on_one_device(self, strategy: Strategy) -> None:
        require_close(train_on_dataset(strategy, 2), trained_on_one_device(2), 4e-5)

    @on_replicas
    def test_batches_are_cut_among_replicas(self, strategy: Strategy) -> None:
        n = strategy.num_replicas_in_sync
        sizes = []
        for one in strategy.distribute_dataset(torch.arange(15), global_batch_size=4):
            parts = strategy.gather(strategy.run(lambda x: torch.tensor([len(x)]), args=(one,)))
            sizes.append(parts.tolist())
        wanted = [len(part) for part in torch.arange(3).tensor_split(n)]
        assert sizes[-1] == wanted
        assert [sum(row) for row in sizes] == [4, 4, 4, 3]

    @on_replicas
    def test_datasets_from_function(self, strategy: Strategy) -> None:
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

    @on_replicas
    def test_replicas_without_examples(self, strategy: Strategy) -> None:
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

    @on_replicas
    def test_average_and_regularization_loss(self, strategy: Strategy) -> None:
        per_example = torch.arange(7.0)
        (one,) = batch(strategy, per_example)
        average = strategy.run(fd.nn.compute_average_loss, args=(one,))
        assert strategy.reduce("sum", average) == pytest.approx(3.0)
        shares = strategy.run(fd.nn.scale_regularization_loss, args=(torch.tensor(2.0),))
        assert strategy.reduce("sum", shares) == pytest.approx(2.0)

    @on_replicas
    def test_accumulation_clipping_unused_and_frozen(self, strategy: Strategy) -> None:
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

        require_close(steps(strategy), steps(fd.OneDeviceStrategy("cpu")), 4e-5)

    @pytest.mark.parametrize("sizes", [(7, 2, 1), (8, 5, 7), (1, 12, 4)])
    @on_replicas
    def test_accumulation_over_batches_that_are_cut_unevenly(
        self, strategy: Strategy, sizes: tuple[int, ...]
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

        require_close(gradients(strategy), gradients(fd.OneDeviceStrategy("cpu")), 1e-6)

    @on_replicas
    def test_gradients_kept_back_for_one_of_several_models(self, strategy: Strategy) -> None:
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

    @on_replicas
    def test_one_of_several_models(self, strategy: Strategy) -> None:
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

    @on_replicas
    def test_gradients_outside_run(self, strategy: Strategy) -> None:
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

        require_close(train(strategy), train(fd.OneDeviceStrategy("cpu")), 1e-5)

    @on_replicas
    def test_sparse_gradients(self, strategy: Strategy) -> None:
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

        require_close(train(strategy), train(fd.OneDeviceStrategy("cpu")), 1e-6)

    @on_replicas
    def test_batches_of_different_structure(self, strategy: Strategy) -> None:
        if len(strategy.devices) == 1:
            return
        with pytest.raises(ValueError, match="different structures"):
            strategy.run(lambda: {"a": 1} if replica_id() % 2 else {"b": 1})
        assert strategy.reduce("sum", strategy.run(lambda: 1.0)) == (strategy.num_replicas_in_sync)
