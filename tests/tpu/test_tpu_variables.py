"""TPUStrategy: variables, updates, checkpoints that move between strategies."""

from __future__ import annotations

from typing import Any

import fastdist as fd
import pytest
import torch
from fastdist import PerReplica, TPUStrategy, VariableAggregation
from fastdist.errors import FastdistError
from torch import nn
from torch.utils._pytree import tree_map_only
from virtual_devices import (
    FIRST,
    MEAN,
    ON_READ,
    SUM,
    N,
    mirrored,
    on_devices,
    traced_id,
    values_of,
)

pytestmark = on_devices


@pytest.mark.parametrize("aggregation", list(VariableAggregation))
def test_aggregated_on_write(strategy: TPUStrategy, aggregation: VariableAggregation) -> None:
    with strategy.scope():
        v = fd.Variable([1.0, 1.0], aggregation=aggregation)

    def step() -> torch.Tensor:
        v.assign(torch.ones(2) * 2)
        return v.value.clone()

    expected = 2.0 * N if aggregation is SUM else 2.0
    assert values_of(strategy, step) == [[expected] * 2] * N
    assert v.value.tolist() == [expected] * 2
    strategy.run(lambda: v.assign_add(1.0))
    expected += N if aggregation is SUM else 1
    assert v.value.tolist() == [expected] * 2
    v.assign(7)
    assert values_of(strategy, lambda: v.value.clone()) == [[7.0, 7.0]] * N
    strategy.check_in_sync()


def test_only_first_replica_and_each_its_own(strategy: TPUStrategy) -> None:
    with strategy.scope():
        first = fd.Variable(5, aggregation=FIRST)
        own = fd.Variable(0.0)
        with pytest.raises(ValueError, match="MEAN"):
            fd.Variable(1, aggregation=MEAN)

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        first.assign(traced_id())
        own.assign(traced_id())
        return first.value.clone(), own.value.clone()

    assert values_of(strategy, lambda: step()[0]) == [0] * N
    assert values_of(strategy, lambda: step()[1]) == [float(i) for i in range(N)]
    assert first.value == 0
    assert [int(v) for v in strategy.local_results(own)] == list(range(N))
    own.assign(PerReplica(tuple(10.0 + i for i in range(N))) if N > 1 else 10.0)
    assert values_of(strategy, lambda: own.value.clone()) == [10.0 + i for i in range(N)]
    strategy.check_in_sync()  # ignores variables that may differ


def test_aggregated_on_read(strategy: TPUStrategy) -> None:
    with strategy.scope():
        sums = fd.Variable(0, synchronization=ON_READ, aggregation=SUM)
        means = fd.Variable(0.0, synchronization=ON_READ, aggregation=MEAN)
        first = fd.Variable(9, synchronization=ON_READ, aggregation=FIRST)
        none = fd.Variable(9, synchronization=ON_READ)

    def step() -> None:
        for v in (sums, means, first, none):
            v.assign(traced_id())
            v.assign_add(0)

    strategy.run(step)
    strategy.run(lambda: None)  # changes nothing
    assert sums.value == N * (N - 1) / 2
    assert means.value == (N - 1) / 2
    assert first.value == 0
    if N > 1:
        with pytest.raises(ValueError, match="has no single value outside run"):
            _ = none.value
    assert [int(v) for v in strategy.local_results(none)] == list(range(N))
    assert strategy.reduce("sum", sums) == N * (N - 1) / 2
    sums.assign(11)
    strategy.run(lambda: sums.assign_add(1))
    assert sums.value == 11 + N


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.seen = fd.Variable(0, synchronization=ON_READ, aggregation=SUM)
        self.loss = fd.Variable(0.0, synchronization=ON_READ, aggregation=MEAN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.assign_add(len(x))
        out: torch.Tensor = self.layer(x)
        return out


def step_from_a_checkpoint(strategy: fd.Strategy, saved: Any, states: Any) -> Any:
    with strategy.scope():
        model = Counter()
        optimizer = torch.optim.Adam(model.parameters())
    model.load_state_dict(saved)
    optimizer.load_state_dict(states)
    seen = int(model.seen.value)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(3, 2)).sum().backward()
        optimizer.step()

    strategy.run(step)
    parameters = [parameter.detach() for parameter in model.parameters()]
    return seen, parameters, model.state_dict(), optimizer.state_dict()


def test_checkpoints_move_between_strategies(strategy: TPUStrategy) -> None:
    with strategy.scope():
        model = Counter()
        optimizer = torch.optim.Adam(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(3, 2, device="xla")).sum().backward()
        model.loss.assign(traced_id())
        optimizer.step()

    strategy.run(step)
    saved = {k: v.cpu() for k, v in model.state_dict().items()}
    assert saved["seen.value"] == 3 * N
    assert saved["loss.value"] == (N - 1) / 2
    states = optimizer.state_dict()

    seen, parameters, values, others_states = mirrored(
        step_from_a_checkpoint,
        saved,
        tree_map_only(torch.Tensor, torch.Tensor.cpu, states),
        replicas=3,
    )
    assert seen == 3 * N
    strategy.run(step)
    for one, same in zip(model.parameters(), parameters, strict=True):
        torch.testing.assert_close(one.detach().cpu(), same.detach(), rtol=0, atol=1e-6)

    model.load_state_dict(values)
    optimizer.load_state_dict(others_states)
    assert model.seen.value == 3 * N + 9
    strategy.run(step)
    assert model.seen.value == 6 * N + 9
    strategy.check_in_sync()


def test_update_each_component(strategy: TPUStrategy) -> None:
    with strategy.scope():
        model = nn.Linear(2, 1)
        v = fd.Variable(1.0)
    parts = strategy.distribute_values_from_function(lambda c: float(c.replica_id_in_sync_group))

    def add(component: torch.Tensor, x: Any) -> Any:
        component.add_(x)
        return x

    strategy.update(v, add, args=(parts,))
    assert [float(x) for x in strategy.local_results(v)] == [1.0 + i for i in range(N)]
    strategy.update(model.weight, lambda component, x: component.fill_(x), args=(3.0,))
    assert model.weight.tolist() == [[3.0, 3.0]]
    strategy.check_in_sync()


def test_out_of_sync_is_seen(strategy: TPUStrategy) -> None:
    with strategy.scope():
        model = nn.Linear(2, 2)

    def spoil() -> None:
        with torch.no_grad():
            model.bias.add_(traced_id())

    strategy.run(spoil)
    if N == 1:
        strategy.check_in_sync()
    else:
        with pytest.raises(FastdistError, match="bias"):
            strategy.check_in_sync()
