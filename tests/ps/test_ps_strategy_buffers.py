"""Buffers on parameter servers: running statistics, counts, infinite values."""

import os
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from fastdist.ps.client.sharded import begin_assign, pull_together
from ps_cluster import PsCluster
from served_net import sgd
from torch import nn


@pytest.fixture(scope="module")
def cluster() -> Iterator[PsCluster]:
    cluster = PsCluster(workers=2, servers=2)
    yield cluster
    cluster.close()


def test_buffers_that_change_after_the_last_step(cluster: PsCluster) -> None:
    """Also if a function that uses no model runs in between."""
    strategy = cluster.strategy(max_staleness=0)
    coordinator = cluster.coordinator(strategy)
    with strategy.scope():
        model = nn.BatchNorm1d(3)
        optimizer = sgd(model.parameters())

    def train(x: torch.Tensor) -> None:
        model(x).sum().backward()
        optimizer.step()
        time.sleep(0.01)
        model(x)  # counts once more

    for _ in range(5):
        coordinator.schedule(train, (torch.randn(8, 3),))
        coordinator.schedule(os.getpid)
        coordinator.schedule(train, (torch.randn(8, 3),))
    coordinator.join()
    assert model.num_batches_tracked == 20


def test_a_buffer_keeps_its_value_until_the_new_one_is_stored(cluster: PsCluster) -> None:
    """Otherwise a failed step would send the changes of other workers as this one's."""
    strategy = cluster.strategy()
    with strategy.scope():
        module = nn.BatchNorm1d(3)
    (model,) = strategy._models
    assert module.running_mean is not None
    served = model.buffers.all["0/running_mean"]
    items = served.sharded.assignment(np.full(3, 7.0))
    strategy.client.wait_all(begin_assign(strategy.client, items))
    (pulled,) = pull_together(strategy.client, [served.sharded.lookup(served.out())])
    assert not served.tensor.any()
    served.store(pulled)
    assert (served.tensor == 7).all()


def test_batch_norm(cluster: PsCluster) -> None:
    strategy = cluster.strategy(max_staleness=0)
    coordinator = cluster.coordinator(strategy)
    with strategy.scope():
        model = nn.BatchNorm1d(3)
        optimizer = sgd(model.parameters())
    other = nn.BatchNorm1d(3)

    def train(x: torch.Tensor) -> None:
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    for i in range(6):
        x = torch.randn(8, 3, generator=torch.Generator().manual_seed(i))
        coordinator.schedule(train, (x,))
        other(x)
    coordinator.join()
    torch.testing.assert_close(model.running_mean, other.running_mean)
    torch.testing.assert_close(model.running_var, other.running_var)
    assert model.num_batches_tracked == 6


def draws(count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [5 + torch.randn(8, 3, generator=generator) for _ in range(count)]


@pytest.mark.slow
@pytest.mark.parametrize("synchronous", [True, False])
@pytest.mark.parametrize("momentum", [0.9, None])
def test_statistics_of_workers_are_averaged(
    cluster: PsCluster, synchronous: bool, momentum: float | None
) -> None:
    """Workers start from the same values; two workers must not move them twice as far."""
    strategy = cluster.strategy(synchronous=synchronous)
    coordinator = cluster.coordinator(strategy)
    with strategy.scope():
        model = nn.BatchNorm1d(3, momentum=momentum)
        optimizer = sgd(model.parameters())
    other = nn.BatchNorm1d(3, momentum=momentum)

    def train(x: torch.Tensor) -> None:
        model(x).sum().backward()
        time.sleep(0.5)  # the other worker begins in the meantime
        optimizer.step()
        optimizer.zero_grad()

    for pair in zip(*[iter(draws(8))] * 2, strict=True):
        for x in pair:
            coordinator.schedule(train, (x,))
        coordinator.join()
        one, two = nn.BatchNorm1d(3, momentum=momentum), nn.BatchNorm1d(3, momentum=momentum)
        for replica, x in zip((one, two), pair, strict=True):
            replica.load_state_dict(other.state_dict())
            replica(x)
        moved = 1.0
        if momentum is None and not synchronous:  # each includes the other's count
            moved = min(2.0, 1.0 + int(other.num_batches_tracked))
        for name in ("running_mean", "running_var"):
            mean = (getattr(one, name) + getattr(two, name)) / 2
            getattr(other, name).lerp_(mean, moved)
            torch.testing.assert_close(getattr(model, name), getattr(other, name))
        other.num_batches_tracked += 1 if synchronous else 2
        assert model.num_batches_tracked == other.num_batches_tracked


class Seen(nn.Module):
    """Remembers the largest value, and the number of values."""

    def __init__(self, seen: int = 0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("largest", torch.full((2,), -torch.inf))
        self.register_buffer("seen", torch.tensor(seen))
        self.register_buffer("total", torch.zeros(2))

    def forward(self, x: torch.Tensor) -> Any:
        self.largest.copy_(torch.maximum(self.largest, x.amax(0)))
        self.seen += len(x)
        self.total += x.sum(0)
        return x * self.weight


@pytest.mark.parametrize("synchronous", [True, False])
def test_infinite_buffers_and_sums(cluster: PsCluster, synchronous: bool) -> None:
    strategy = cluster.strategy(synchronous=synchronous)
    coordinator = cluster.coordinator(strategy)
    with strategy.scope():
        model = Seen()
        optimizer = sgd(model.parameters())

    def train(x: torch.Tensor) -> None:
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    for x in (1.0, 3.0, 2.0):
        coordinator.schedule(train, (torch.full((4, 2), x),))
        coordinator.join()
    assert model.largest.tolist() == [3.0, 3.0]
    for _ in range(6):
        coordinator.schedule(train, (torch.ones(4, 2),))
    coordinator.join()
    # Groups of two are one step of one device.
    assert model.seen == (24 if synchronous else 36)
    assert model.total.tolist() == [36.0 if synchronous else 48.0] * 2


def test_changes_without_a_step_in_a_group(cluster: PsCluster) -> None:
    strategy = cluster.strategy(synchronous=True)
    coordinator = cluster.coordinator(strategy)
    with strategy.scope():
        model = Seen()

    def look(x: float) -> None:
        model(torch.full((1, 2), x))

    for x in (1.0, 2.0, 3.0, 4.0):
        coordinator.schedule(look, (x,))
    coordinator.join()
    assert model.total.tolist() == [5.0, 5.0]
    assert model.seen == 2


def test_integers_beyond_float32(cluster: PsCluster) -> None:
    strategy = cluster.strategy()
    coordinator = cluster.coordinator(strategy)
    refused = pytest.raises(ValueError, match=r"seen is 16777217: .* exact up to 2\*\*24")
    with refused, strategy.scope():
        _model = Seen((1 << 24) + 1)
    with strategy.scope():
        model = Seen((1 << 24) - 1)
        norm = nn.BatchNorm1d(2)
    norm.num_batches_tracked.fill_(1 << 24)  # only a mean over all batches divides by it

    def look() -> None:
        norm(torch.ones(2, 2))
        model(torch.ones(1, 2))

    coordinator.schedule(look)
    with pytest.raises(ValueError, match=r"seen is 16777216: "):
        coordinator.join()
