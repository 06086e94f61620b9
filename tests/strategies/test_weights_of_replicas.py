"""`run` with `weight`: means over tokens or class weights, as on one device."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import fastdist as fd
import pytest
import torch
import torch.nn.functional as F
from digits_training import require_close
from fastdist import Strategy
from fastdist.errors import CollectiveMismatchError, FastdistError
from replica_runs import Run, ranks, run
from torch import nn

__all__ = ["ranks", "run"]  # fixtures

PADDING = -100
CLASS_WEIGHTS = torch.tensor([1.0, 5.0, 0.1, 2.0, 3.0], dtype=torch.float64)


def sequences(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs of 6 positions, of which a different number counts; rows 6 to 9 count nothing."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(count, 6, 3, dtype=torch.float64, generator=generator)
    y = torch.randint(0, 5, (count, 6), generator=generator)
    for i in range(count):
        y[i, 1 + i % 6 :] = PADDING
    y[6:10] = PADDING
    return x, y


def trained(
    strategy: Strategy,
    weights: torch.Tensor | None,
    size: int,
    batches_per_step: int,
    *,
    weighs_inside: bool = False,
) -> tuple[list[torch.Tensor], list[float]]:
    """Return the parameters and losses of an epoch."""
    torch.manual_seed(0)
    with strategy.scope():
        model = nn.Linear(3, 5).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def backward(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if weighs_inside:
            fd.get_replica_context().weight(counted(y))
        loss = F.cross_entropy(
            model(x).flatten(0, 1), y.flatten(), weight=weights, ignore_index=PADDING
        )
        loss.backward()
        return loss.detach()

    def counted(y: torch.Tensor) -> torch.Tensor:
        kept = y[y != PADDING]
        return torch.tensor(len(kept)) if weights is None else weights[kept].sum()

    losses = []
    batches = strategy.distribute_dataset(sequences(24), global_batch_size=size)
    for i, (x, y) in enumerate(batches, 1):
        is_last = i % batches_per_step == 0
        with nullcontext() if is_last else strategy.no_sync():
            weight = None if weighs_inside else fd.map(counted, y)
            loss = strategy.run(backward, (x, y), weight=weight)
        losses.append(float(strategy.reduce("mean", fd.map(lambda value: value + 0, loss))))
        if is_last:
            strategy.run(optimizer.step)
            optimizer.zero_grad()
    strategy.check_in_sync()
    return [parameter.detach().clone() for parameter in model.parameters()], losses


@pytest.mark.parametrize("kind", ["mirrored", "overlapping", "central"])
@pytest.mark.parametrize("weights", [None, CLASS_WEIGHTS], ids=["tokens", "classes"])
@pytest.mark.parametrize("inside", [False, True], ids=["by run", "inside"])
def test_means_over_what_counts(
    run: Run, kind: str, weights: torch.Tensor | None, inside: bool
) -> None:
    """With even and uneven batches, replicas of padding alone, and accumulated gradients."""

    def case(strategy: Strategy) -> None:
        for size, batches_per_step in ((12, 1), (5, 1), (8, 3)):
            one = trained(fd.OneDeviceStrategy("cpu"), weights, size, batches_per_step)
            got = trained(strategy, weights, size, batches_per_step, weighs_inside=inside)
            require_close(got[0], one[0], 1e-12)
            assert got[1] == pytest.approx(one[1], rel=1e-12)

    run(case, kind)


def test_backwards_of_one_run_have_weights_of_their_own(run: Run) -> None:
    def case(strategy: Strategy) -> None:
        x, y = sequences(12)
        is_odd = torch.arange(12) % 2 == 1

        def gradients(strategy: Strategy) -> list[torch.Tensor]:
            torch.manual_seed(0)
            with strategy.scope():
                model = nn.Linear(3, 5).double()

            def step(x: torch.Tensor, y: torch.Tensor, is_odd: torch.Tensor) -> None:
                for part in (is_odd, ~is_odd):
                    kept = torch.where(part.unsqueeze(1), y, PADDING)
                    fd.get_replica_context().weight((kept != PADDING).sum())
                    F.cross_entropy(model(x).flatten(0, 1), kept.flatten()).backward()

            for batch in strategy.distribute_dataset((x, y, is_odd), global_batch_size=12):
                strategy.run(step, batch)
            return [p.grad for p in model.parameters() if p.grad is not None]

        require_close(gradients(strategy), gradients(fd.OneDeviceStrategy("cpu")), 1e-12)

    run(case)


def test_a_mean_over_accumulated_batches(run: Run) -> None:
    def case(strategy: Strategy) -> None:
        x, y = sequences(24)
        torch.manual_seed(0)
        with strategy.scope():
            model = nn.Linear(3, 5).double()
        total = (y != PADDING).sum()

        def backward(x: torch.Tensor, y: torch.Tensor) -> None:
            weights = fd.get_replica_context().weights
            assert weights is not None
            loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
            (loss * sum(weights) / total).backward()

        for i, batch in enumerate(strategy.distribute_dataset((x, y), global_batch_size=7)):
            with strategy.no_sync() if i < 3 else nullcontext():
                weight = fd.map(lambda y: (y != PADDING).sum(), batch[1])
                strategy.run(backward, batch, weight=weight)

        one = nn.Linear(3, 5).double()
        one.load_state_dict(model.state_dict())
        F.cross_entropy(one(x).flatten(0, 1), y.flatten()).backward()
        gradients = [[p.grad for p in m.parameters() if p.grad is not None] for m in (model, one)]
        require_close(*gradients, 1e-12)

    run(case)


def test_collectives_in_run(run: Run) -> None:
    """The gradient through `all_reduce` is the weighted mean's too."""

    def case(strategy: Strategy) -> None:
        x = sequences(7)[0][:, 0]
        own = x.sum(1) + 4.0

        def trained(strategy: Strategy) -> list[torch.Tensor]:
            torch.manual_seed(0)
            with strategy.scope():
                model = nn.Linear(3, 1).double()

            def step(x: torch.Tensor, own: torch.Tensor) -> None:
                value = model(x).squeeze(1)
                total = fd.get_replica_context().all_reduce("sum", (own * value).sum())
                mean = (own * value.square()).sum() / own.sum()
                (mean + total.square()).backward()

            for batch in strategy.distribute_dataset((x, own), global_batch_size=7):
                strategy.run(step, batch, weight=fd.map(torch.sum, batch[1]))
            return [p.grad.clone() for p in model.parameters() if p.grad is not None]

        require_close(trained(strategy), trained(fd.OneDeviceStrategy("cpu")), 1e-12)

    run(case)


def test_the_context_tells_weights(run: Run) -> None:
    def case(strategy: Strategy) -> None:
        number = strategy.local_replica_ids[0]
        count = strategy.num_replicas_in_sync

        def look() -> tuple[Any, float]:
            replica = fd.get_replica_context()
            assert replica.examples is None
            return str(replica.weights), replica.relative_weight

        result = strategy.run(look, weight=number + 1)
        expected = tuple(float(i + 1) for i in range(count))
        assert result[0] == str(expected)
        assert result[1].weights == expected
        assert result[1].values == (pytest.approx((number + 1) * count / sum(expected)),)

    run(case)


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        (math.nan, ValueError, "weight must be finite and not negative, got nan on replica 1"),
        (-1, ValueError, "weight must be finite and not negative, got -1.0 on replica 1"),
    ],
)
def test_weights_that_are_no_weights(run: Run, wrong: Any, error: type, message: str) -> None:
    def case(strategy: Strategy) -> None:
        weight = wrong if strategy.local_replica_ids[0] == 1 else 1.0
        with pytest.raises(error, match=message):
            strategy.run(lambda: None, weight=weight)
        assert strategy.reduce("sum", strategy.run(lambda: 1.0)) == strategy.num_replicas_in_sync

    run(case)


@pytest.mark.parametrize("wrong", ["3", [1], torch.ones(2), 1j, torch.tensor(1j)])
def test_weights_that_are_no_numbers(run: Run, wrong: Any) -> None:
    def case(strategy: Strategy) -> None:
        for each in (strategy, fd.OneDeviceStrategy("cpu")):
            with pytest.raises(TypeError, match="weight must be a number"):
                each.run(lambda: None, weight=wrong)
            with pytest.raises(TypeError, match="weight must be a number"):
                each.run(lambda: fd.get_replica_context().weight(wrong))

    run(case)


def test_a_weight_that_one_replica_gives(run: Run) -> None:
    def case(strategy: Strategy) -> None:
        with strategy.scope():
            model = nn.Linear(2, 1)

        def step() -> None:
            model(torch.ones(1, 2)).sum().backward()

        is_first = strategy.local_replica_ids[0] == 0
        with pytest.raises(CollectiveMismatchError, match="all_gather"):
            strategy.run(step, weight=1.0 if is_first else None)

        def weigh_alone() -> None:
            if is_first:
                fd.get_replica_context().weight(1.0)
            step()

        with pytest.raises(FastdistError):
            strategy.run(weigh_alone)

    run(case)


# How labels are padded, whether a step tells its weight, and whether it must be warned.
LOSSES: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], bool, bool]] = {
    "uneven": (lambda y: y, False, True),
    "weighed": (lambda y: y, True, False),
    "none padded": (lambda y: y.clamp(min=0), False, False),
    # As transformers shifts labels: one position less in every sequence.
    "equally padded": (
        lambda y: torch.cat([y[:, :-1].clamp(min=0), y.new_full((len(y), 1), -100)], 1),
        False,
        False,
    ),
}


@pytest.mark.parametrize("what", LOSSES)
@pytest.mark.parametrize("classes", [None, CLASS_WEIGHTS], ids=["tokens", "classes"])
def test_a_mean_that_needs_a_weight_warns(
    run: Run, what: str, classes: torch.Tensor | None
) -> None:
    pad, weighs, warns = LOSSES[what]

    def case(strategy: Strategy) -> list[str]:
        x, y = sequences(24)
        y = pad(y)
        with strategy.scope():
            model = nn.Linear(3, 5).double()

        def step(a: torch.Tensor, b: torch.Tensor) -> None:
            loss = F.cross_entropy(model(a).flatten(0, 1), b.flatten(), classes)
            (loss / 2 + model.weight.square().sum()).backward()

        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for a, b in strategy.distribute_dataset((x, y), global_batch_size=12):
                count = fd.map(lambda y: (y != PADDING).sum() + 1, b)
                strategy.run(step, (a, b), weight=count if weighs else None)
        return [f"{Path(w.filename).name} {w.message}" for w in caught]

    expected = warns or (classes is not None and not weighs)
    chief, *others = run(case)
    assert not any(others)
    assert len(chief) == expected
    for text in chief:
        assert re.match("<dynamic-code> .*weight=", text)


def test_results_of_different_weights() -> None:
    first, second = (fd.PerReplica((1.0,), None, weights) for weights in ((1.0, 2.0), (2.0, 1.0)))
    with pytest.raises(ValueError, match="different weights of replicas"):
        fd.map(lambda a, b: a + b, first, second)
    assert fd.map(abs, first).weights == (1.0, 2.0)
