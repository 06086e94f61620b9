"""Parts of the tests of strategies: batches of real data, training with and without a strategy."""

from __future__ import annotations

import functools
import os
from typing import Any

import fastdist as fd
import torch
import torch.nn.functional as F
from fastdist import PerReplica, Strategy
from torch import nn


def replica_id() -> int:
    context = fd.get_replica_context()
    assert context is not None
    return context.replica_id_in_sync_group


def own_devices() -> list[str] | None:
    """The devices of a program that starts itself; None under a launcher."""
    count = os.environ.get("REPLICAS")
    return None if count is None else [f"cpu:{i}" for i in range(int(count))]


def per_replica(strategy: Strategy, values: list[Any], counts: Any = None) -> Any:
    """Choose this process's values from those of all replicas."""
    own = tuple(values[i] for i in strategy.local_replica_ids)
    return PerReplica(own, counts)


def batch(strategy: Strategy, *arrays: torch.Tensor) -> tuple[Any, ...]:
    """A global batch as `distribute_dataset` gives it."""
    n = strategy.num_replicas_in_sync
    counts = tuple(len(part) for part in arrays[0].tensor_split(n))
    parts = [
        [
            part.to(strategy.devices[i % len(strategy.devices)])
            for i, part in enumerate(a.tensor_split(n))
        ]
        for a in arrays
    ]
    return tuple(per_replica(strategy, own, counts) for own in parts)


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
