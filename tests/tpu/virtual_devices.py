"""Shared parts of the tests of TPUStrategy: the virtual devices, and training on them."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import fastdist as fd
import pytest
import torch
import torch.nn.functional as F
from digits_training import digits, replica_id
from fastdist import TPUStrategy, VariableAggregation, VariableSynchronization
from torch import nn

N = int(os.environ.get("CPU_NUM_DEVICES", "1"))  # fixed once torch_xla has started
HAS_XLA = find_spec("torch_xla") is not None
ON_CPU = HAS_XLA and os.environ.get("PJRT_DEVICE") == "CPU"
on_devices = [
    pytest.mark.xla,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not HAS_XLA, reason="needs torch_xla: pip install '.[tpu]'"),
    pytest.mark.skipif(HAS_XLA and not ON_CPU, reason="needs PJRT_DEVICE=CPU"),
]
SUM, MEAN = VariableAggregation.SUM, VariableAggregation.MEAN
FIRST = VariableAggregation.ONLY_FIRST_REPLICA
ON_READ = VariableSynchronization.ON_READ


def traced_id() -> torch.Tensor:
    return torch.as_tensor(replica_id()).to("xla")


def values_of(strategy: TPUStrategy, fn: Any, *args: Any) -> list[Any]:
    """Return the result of `fn` on each replica, as lists and numbers."""
    results = strategy.local_results(strategy.run(fn, args))
    made = [r.tolist() if isinstance(r, torch.Tensor) else r for r in results]
    return made if len(made) == N else made * N


def mirrored(case: Callable[..., Any], *args: Any, replicas: int = N) -> Any:
    """Return the result of `case(strategy, *args)` with replicas on the CPU, in processes."""

    def run() -> Any:
        torch.set_num_threads(1)
        return case(fd.MirroredStrategy(), *args)

    return fd.launch(run, replicas=replicas)


def train_on_dataset(strategy: fd.Strategy, make: Any, epochs: int, **options: Any) -> Any:
    """Train on shuffled digits; with batches of 100, the last batch has 97 examples."""
    torch.manual_seed(1)
    with strategy.scope():
        model, optimizer = make()
    batches = strategy.distribute_dataset(digits(), shuffle=True, seed=3, **options)

    def step(batch: Any) -> torch.Tensor:
        x, y = batch
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    losses = [
        strategy.reduce("mean", strategy.run(step, args=(one,)))
        for _ in range(epochs)
        for one in batches
    ]
    strategy.check_in_sync()
    tensors = [*model.parameters(), *model.buffers()]
    values = [tensor.detach().cpu().clone() for tensor in tensors]
    return values, [float(loss) for loss in losses]


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 32), nn.Linear(32, 10)
        self.norm = nn.BatchNorm1d(32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.second(F.relu(self.norm(self.first(x))))
        return out


def normed() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Normed()
    return model, torch.optim.SGD(model.parameters(), lr=0.05)
