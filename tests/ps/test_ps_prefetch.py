"""Rows of later batches that come with the dense values: `strategy.prefetch`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import fastdist as fd
import pytest
import torch
from fastdist.errors import FastdistError
from ps_cluster import PsCluster
from served_net import adagrad
from torch import nn

DIMS = {"day": (7, 3), "shop": (None, 4), "word": (50, 8)}


@pytest.fixture(scope="module")
def cluster() -> Iterator[PsCluster]:
    cluster = PsCluster(workers=2, servers=2)
    yield cluster
    cluster.close()


class Net(nn.Module):
    """Bags of features, two of which share a table, and a layer."""

    def __init__(self, cached_rows: int = 0) -> None:
        super().__init__()
        bags = {
            name: fd.nn.EmbeddingBag(
                rows, dim, mode="sum", seed=dim, padding_idx=1, cached_rows=cached_rows
            )
            for name, (rows, dim) in DIMS.items()
        }
        self.bags = fd.nn.EmbeddingBagCollection({**bags, "shop_before": bags["shop"]})
        self.head = nn.Linear(19, 1)
        nn.init.constant_(self.head.weight, 0.1)

    def forward(self, features: Any) -> torch.Tensor:
        pooled = self.bags(features)
        return self.head(torch.cat([pooled[name] for name in sorted(pooled)], 1))


def batch_of(seed: int) -> tuple[dict[str, Any], torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def ids(most: int, *shape: int) -> torch.Tensor:
        return torch.randint(most, shape, generator=generator)

    shops = ids(40, 11), torch.tensor([0, 1, 1, 5, 9, 10])
    features = {"day": ids(7, 6, 2), "shop": shops, "shop_before": ids(40, 6, 1)}
    return {**features, "word": ids(50, 6, 3)}, torch.rand(6, 1, generator=generator)


def step(model: Any, optimizer: Any, batch: Any) -> float:
    features, y = batch
    optimizer.zero_grad()
    loss = (model(features) - y).square().mean()
    loss.backward()
    optimizer.step()
    return float(loss.detach())


def values_after(cluster: PsCluster, train: Any, **mode: Any) -> list[Any]:
    """Return losses, dense values and rows after some functions."""
    torch.manual_seed(3)
    strategy = cluster.strategy(**mode)
    coordinator = cluster.coordinator(strategy)
    with strategy.scope():
        model = Net()
        optimizer = adagrad(model.parameters())
    losses = [
        coordinator.schedule(train, (strategy, model, optimizer, number)) for number in range(10)
    ]
    coordinator.join()
    rows = [model(batch_of(seed)[0]).detach().double() for seed in (0, 9, 99)]
    return [coordinator.fetch(losses), model.head.weight.detach().double(), *rows]


def plain(strategy: Any, model: Any, optimizer: Any, number: int) -> list[float]:
    return [step(model, optimizer, batch_of(number + at)) for at in (0, 1)]


def ahead(strategy: Any, model: Any, optimizer: Any, number: int) -> list[float]:
    """Announce batches before and after steps, twice, too late, and some that never come."""
    losses = []
    for at in (0, 1):
        for later in (number + 1, number + 2, number + 2, 1000 + number):
            strategy.prefetch({"first": [batch_of(later)]})
        losses.append(step(model, optimizer, batch_of(number + at)))
        strategy.prefetch(batch_of(number + 1)[0])
    return losses


@pytest.mark.parametrize(
    "mode", [pytest.param({"max_staleness": 0}, marks=pytest.mark.slow), {"synchronous": True}]
)
def test_the_numbers_are_the_same(cluster: PsCluster, mode: dict[str, Any]) -> None:
    """Two workers take turns, or step together: a row that is a step old would be seen."""
    if "synchronous" in mode:
        first, second = (values_after(cluster, train, **mode)[1:] for train in (plain, ahead))
        for one, other in zip(first, second, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
        return
    (losses, *first), (again, *second) = (
        values_after(cluster, train, **mode) for train in (plain, ahead)
    )
    assert losses == again
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def test_a_step_takes_one_message_for_each_server(cluster: PsCluster) -> None:
    """The reply to the gradients brings the dense values and the rows of the next batch."""
    strategy = cluster.strategy(max_staleness=0)
    coordinator = cluster.coordinator(strategy)
    with strategy.scope():
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def requests() -> list[int]:
        return [strategy.client.stats(server)["requests"] for server in range(2)]

    def train(count: int) -> list[int]:
        strategy.prefetch(batch_of(0))
        step(model, optimizer, batch_of(500))
        before = requests()
        for number in range(count):
            strategy.prefetch(batch_of(number + 1))
            step(model, optimizer, batch_of(number))
        return [now - was - 1 for now, was in zip(requests(), before, strict=True)]

    took = coordinator.fetch(coordinator.schedule(train, (5,)))
    assert took == [5, 5]


@pytest.mark.parametrize("kind", [fd.nn.Embedding, nn.EmbeddingBag])
def test_single_layers(cluster: PsCluster, kind: type) -> None:
    strategy = cluster.strategy(max_staleness=0)
    coordinator = cluster.coordinator(strategy)
    with strategy.scope():
        layer, other = kind(50, 3), nn.Linear(3, 1)
        optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    before = layer(torch.tensor([[4, 4, 9]])).detach()

    def train(ids: torch.Tensor) -> list[int]:
        for _ in range(2):
            optimizer.zero_grad()
            strategy.prefetch(ids, layer)
            layer(ids).sum().backward()
            optimizer.step()
        counts = [strategy.client.stats(server)["requests"] for server in range(2)]
        rows = layer(ids).detach()
        again = [strategy.client.stats(server)["requests"] for server in range(2)]
        return [rows, sum(again) - sum(counts)]

    rows, requests = coordinator.fetch(coordinator.schedule(train, (torch.tensor([[4, 4, 9]]),)))
    coordinator.join()
    assert torch.equal(rows, layer(torch.tensor([[4, 4, 9]])))
    assert not torch.equal(rows, before)
    assert requests == 2  # those for the counts
    for wrong in (other, "layer"):
        coordinator.schedule(lambda wrong=wrong: strategy.prefetch(torch.tensor([1]), wrong))
        with pytest.raises(TypeError, match="layer must be an embedding of the scope, got"):
            coordinator.join()


def test_cached_rows_are_not_prefetched(cluster: PsCluster) -> None:
    strategy = cluster.strategy()
    coordinator = cluster.coordinator(strategy)
    with strategy.scope():
        model = Net(cached_rows=100)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    value = coordinator.schedule(ahead, (strategy, model, optimizer, 3))
    coordinator.join()
    assert len(value.fetch()) == 2


@pytest.mark.slow
def test_batches_that_cannot_be_read(cluster: PsCluster) -> None:
    strategy = cluster.strategy()
    coordinator = cluster.coordinator(strategy)
    with strategy.scope():
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    features, _ = batch_of(0)
    with pytest.raises(FastdistError, match="prefetch must be called in a function"):
        strategy.prefetch(features)

    def announce(batch: Any) -> None:
        assert model.training
        strategy.prefetch(batch)

    for batch, kind, message in (
        (torch.ones(3), ValueError, r"prefetch: expected the features of an .*; got tensor\("),
        (({"x": features["day"]}, 4), ValueError, "prefetch: expected the features"),
        ({"day": features["day"]}, ValueError, "lacks the features shop, word, shop_before"),
        ({**features, "day": torch.ones(6, 2)}, TypeError, "ids must be integers, got float32"),
        ({**features, "day": torch.full((6, 2), 7)}, IndexError, "day.weight': .*7"),
    ):
        coordinator.schedule(announce, (batch,))
        with pytest.raises(kind, match=message):
            coordinator.join()
    value = coordinator.schedule(step, (model, optimizer, batch_of(0)))
    assert value.fetch() > 0
