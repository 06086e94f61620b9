"""Programs whose numbers would differ from one device's: right, an error or a warning."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import fastdist as fd
import pytest
import torch
import torch.nn.functional as F
from digits_training import require_close
from fastdist import Strategy
from fastdist.errors import FastdistError, LostRankError, UnsupportedError
from replica_runs import Run, ranks, run
from torch import nn
from torch.utils.checkpoint import checkpoint

__all__ = ["ranks", "run"]  # fixtures

Train = Callable[[Strategy], list[torch.Tensor]]


def data(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(count, 3, dtype=torch.float64, generator=generator)
    return x, x.sum(1, keepdim=True)


def as_on_one_device(train: Train) -> Callable[[Strategy], None]:
    def case(strategy: Strategy) -> None:
        one = train(fd.OneDeviceStrategy("cpu"))
        require_close(train(strategy), one, 1e-12)

    return case


def values(module: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in module.parameters()]


def warned(call: Callable[[], Any]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [str(each.message) for each in caught]


@pytest.mark.parametrize("size", [4, 5, 8])
def test_a_backward_before_those_that_no_sync_holds(run: Run, size: int) -> None:
    """An expert gets gradients on some replicas alone while `no_sync` holds them."""

    def train(strategy: Strategy) -> list[torch.Tensor]:
        torch.manual_seed(0)
        with strategy.scope():
            model = nn.ModuleList([nn.Linear(3, 1), nn.Linear(3, 1)]).double()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

        def backward(x: torch.Tensor, y: torch.Tensor) -> None:
            loss = (model[0](x) - y).square().mean() if len(x) else model[0](x).sum()
            if (chosen := x[:, 0] > 1).any():
                loss = loss + (model[1](x[chosen]) - 1).square().sum() / len(x)
            loss.backward()

        for i, batch in enumerate(strategy.distribute_dataset(data(35), global_batch_size=size)):
            with strategy.no_sync() if i % 3 == 1 else nullcontext():
                strategy.run(backward, batch)
            if i % 3 == 2:
                strategy.run(optimizer.step)
                optimizer.zero_grad()
        return values(model)

    run(as_on_one_device(train))


@pytest.mark.parametrize("how", ["all_gather", "all_reduce", "SyncBatchNorm"])
def test_a_weight_after_forward(run: Run, how: str) -> None:
    def train(strategy: Strategy) -> list[torch.Tensor]:
        torch.manual_seed(0)
        norm = fd.nn.SyncBatchNorm(4) if how == "SyncBatchNorm" else nn.Tanh()
        with strategy.scope():
            model = nn.Sequential(nn.Linear(3, 4, bias=False), norm, nn.Linear(4, 1)).double()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: torch.Tensor, y: torch.Tensor) -> None:
            replica = fd.get_replica_context()
            optimizer.zero_grad()
            h = model[1](model[0](x))
            if how == "all_gather":
                h = h - replica.all_gather(h).mean(0)
            elif how == "all_reduce":
                h = h - replica.all_reduce("sum", h.sum(0)) / 12
            counts = 1 + (y > 0).double()
            replica.weight(counts.sum())
            ((model[2](h) - y).square() * counts).sum().div(counts.sum()).backward()
            optimizer.step()

        for batch in strategy.distribute_dataset(data(60), global_batch_size=12):
            strategy.run(step, batch)
        return values(model)

    run(as_on_one_device(train))


def test_results_that_have_no_gradient_or_not_this_one(run: Run) -> None:
    def case(strategy: Strategy) -> None:
        with strategy.scope():
            model = nn.Linear(3, 1)

        def step() -> None:
            replica = fd.get_replica_context()
            loss = model(torch.ones(2, 3)).sum()
            assert torch.equal(replica.all_reduce("max", loss), loss)
            with torch.no_grad():
                assert torch.equal(replica.all_reduce("mean", model.weight), model.weight)
                rows = replica.all_gather(model.weight)
            assert len(rows) == strategy.num_replicas_in_sync
            assert not rows.requires_grad
            mean = replica.all_reduce("mean", loss * 1)
            if strategy.num_replicas_in_sync > 1:
                with pytest.raises(RuntimeError, match="view"):
                    mean *= 2  # whose gradient would not have the weight of this replica

        strategy.run(step)

    run(case)


def test_activations_of_a_replica_that_counts_nothing(run: Run) -> None:
    def case(strategy: Strategy) -> None:
        with strategy.scope():
            model = nn.Linear(3, 1)

        def step() -> None:
            replica = fd.get_replica_context()
            replica.weight(float(replica.replica_id_in_sync_group == 0))
            replica.all_gather(model(torch.ones(2, 3))).square().mean().backward()

        is_first = strategy.local_replica_ids[0] == 0
        with pytest.raises((FastdistError, LostRankError)) as caught:
            strategy.run(step)
        assert ("counts nothing in the mean" in str(caught.value)) != is_first

    run(case)


@pytest.mark.parametrize("kind", ["mirrored", "overlapping", "central"])
def test_reentrant_checkpoints_between_two_models(run: Run, kind: str) -> None:
    def train(strategy: Strategy) -> list[torch.Tensor]:
        torch.manual_seed(0)
        with strategy.scope():
            layers = nn.ModuleList([nn.Linear(3, 3) for _ in range(3)]).double()
            heads = nn.ModuleList([nn.Linear(3, 1), nn.Linear(3, 1)]).double()
            both = nn.ModuleList([layers, heads]).parameters()
            optimizer = torch.optim.SGD(both, lr=0.1)

        def step(x: torch.Tensor, y: torch.Tensor) -> None:
            optimizer.zero_grad()
            h = layers[0](x)
            for layer in layers[1:]:
                h = checkpoint(lambda h, layer=layer: layer(h).tanh(), h, use_reentrant=True)
            loss = (heads[0](h) - y).square().mean()
            if (chosen := x[:, 0] > 1).any():
                loss = loss + heads[1](h[chosen]).square().sum() / len(x)
            loss.backward()
            optimizer.step()

        for batch in strategy.distribute_dataset(data(40), global_batch_size=8):
            strategy.run(step, batch)
        return [*values(layers), *values(heads)]

    run(as_on_one_device(train), kind)


def autograd(model: nn.Module, loss: torch.Tensor) -> list[torch.Tensor]:
    return list(torch.autograd.grad(loss, list(model.parameters())))


@pytest.mark.parametrize("kind", ["mirrored", "central"])
def test_runs_in_the_open_scope(run: Run, kind: str) -> None:
    """They use the chief's first values, and train what the scope has made so far."""

    def train(strategy: Strategy) -> list[torch.Tensor]:
        torch.manual_seed(0)
        with strategy.scope():
            model = nn.Linear(3, 1).double()
            model.weight.data.fill_(strategy.is_chief)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

            def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
                optimizer.zero_grad()
                loss = (model(x) - y).square().mean()
                loss.backward()
                optimizer.step()
                return loss.detach()

            batches = strategy.distribute_dataset(data(26), global_batch_size=13)
            losses = [strategy.reduce("mean", strategy.run(step, batch)) for batch in batches]
            strategy.check_in_sync()
            outer = nn.Sequential(model, nn.Linear(1, 1, bias=False).double())
            outer[1].weight.data.fill_(strategy.is_chief)
            strategy.run(lambda: outer(torch.ones(1, 3).double()))
            strategy.check_in_sync()
        return [*values(outer), *map(torch.as_tensor, losses)]

    run(as_on_one_device(train), kind)


@pytest.mark.parametrize("kind", ["mirrored", "central"])
def test_evaluations_of_different_data(run: Run, kind: str) -> None:
    def case(strategy: Strategy) -> None:
        with strategy.scope():
            model = nn.Linear(3, 1).double()

        def evaluate(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return (model(x) - y).square().mean().detach()

        def mean(first: int) -> None:
            for x, y in strategy.distribute_dataset(
                tuple(each[first : first + 12] for each in data(26)), global_batch_size=6
            ):
                strategy.reduce("mean", strategy.run(evaluate, (x, y)))

        mean(0)
        mean(5)
        with pytest.raises(FastdistError, match=r"other examples at .* on replica 1"):
            mean(strategy.local_replica_ids[0])

    run(case, kind)


def test_a_module_of_another_strategy(run: Run) -> None:
    def case(strategy: Strategy) -> None:
        with strategy.scope():
            model = nn.Linear(3, 1).double()
        other = fd.OneDeviceStrategy("cpu")
        with pytest.raises(RuntimeError, match="belongs to another strategy than"):
            other.run(lambda: model(torch.ones(1, 3).double()).sum().backward())

    run(case)


@pytest.mark.parametrize("kind", ["mirrored", "central", "sharded"])
@pytest.mark.parametrize("averages", [False, True])
def test_steps_by_gradients_of_autograd_grad(run: Run, kind: str, averages: bool) -> None:
    def case(strategy: Strategy) -> None:
        with strategy.scope():
            model = nn.Linear(3, 1).double()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: torch.Tensor, y: torch.Tensor) -> None:
            gradients = autograd(model, (model(x) - y).square().mean())
            if averages:  # as the error says, and right for uneven parts
                replica = fd.get_replica_context()
                weighed = [replica.relative_weight * g for g in gradients]
                gradients = replica.all_reduce("mean", weighed)
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter.grad = gradient
            optimizer.step()
            optimizer.zero_grad()

        def train() -> None:
            for batch in strategy.distribute_dataset(data(26), global_batch_size=13):
                strategy.run(step, batch)

        with fd.OneDeviceStrategy("cpu").scope():
            alone = nn.Linear(3, 1).double()
            alone.load_state_dict(model.state_dict())
        if averages:
            train()
            strategy.check_in_sync()
            one = torch.optim.SGD(alone.parameters(), lr=0.1)
            x, y = data(26)
            for part in (slice(13), slice(13, 26)):
                (alone(x[part]) - y[part]).square().mean().backward()
                one.step()
                one.zero_grad()
            require_close(values(model), values(alone), 1e-12)
        else:
            with pytest.raises(FastdistError, match="in a run without backward") as caught:
                train()
            assert caught.value.ranks == (1,)

    run(case, kind)


def test_updates_by_hand(run: Run) -> None:
    def case(strategy: Strategy) -> None:
        with strategy.scope():
            model = nn.Linear(3, 1).double()

        def step(x: torch.Tensor, y: torch.Tensor) -> None:
            with torch.enable_grad():
                gradients = autograd(model, (model(x) - y).square().mean())
            with torch.no_grad():
                for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                    parameter -= 0.1 * gradient

        def train() -> None:
            for batch in strategy.distribute_dataset(data(24), global_batch_size=12):
                strategy.run(step, batch)

        with pytest.raises(FastdistError, match="in a run without backward"):
            train()

    run(case)


def losses(kind: str, model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    classes = (y.squeeze(1) > 0).long()
    if kind == "masked":
        chosen = x[:, 0] > 0
        return F.cross_entropy(model(x)[chosen], classes[chosen])
    penalty = sum(parameter.square().sum() for parameter in model.parameters())
    return F.cross_entropy(model(x), classes) + 0.1 * penalty


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("masked", "the loss is a mean over the positions that count"),
        ("means", None),
    ],
)
@pytest.mark.parametrize("size", [12, 11])
def test_losses_that_are_no_means_over_examples(
    run: Run, kind: str, said: str | None, size: int
) -> None:
    def case(strategy: Strategy) -> None:
        with strategy.scope():
            model = nn.Linear(3, 2).double()

        def step(x: torch.Tensor, y: torch.Tensor) -> None:
            losses(kind, model, x, y).backward()

        def train() -> None:
            for batch in strategy.distribute_dataset(data(48), global_batch_size=size):
                strategy.run(step, batch)

        found = [text for text in warned(train) if text.startswith("the loss is")]
        assert len(found) == (said is not None and strategy.is_chief)
        assert all(said is not None and text.startswith(said) for text in found)

    run(case)


def test_tensors_outside_of_modules(run: Run) -> None:
    def case(strategy: Strategy) -> None:
        with strategy.scope():
            nn.Linear(3, 1)
        tensor = torch.zeros(3, requires_grad=True)
        parameter = nn.Parameter(torch.zeros(3))
        found = warned(lambda: strategy.run(lambda: (tensor * 2).sum().backward()))
        assert ("a tensor of shape (3,), made outside of run," in str(found)) == strategy.is_chief
        with pytest.raises(ValueError, match=r"a parameter of shape \(3,\) is of no module"):
            strategy.run(lambda: (parameter * 2).sum().backward())

    run(case)


def test_embeddings_that_renormalize_rows(run: Run) -> None:
    def case(strategy: Strategy) -> None:
        with pytest.raises(UnsupportedError, match="0 is an Embedding with max_norm"):  # noqa: SIM117
            with strategy.scope():
                model = nn.Sequential(nn.Embedding(5, 2, max_norm=1.0))
        assert model is not None

    run(case)
