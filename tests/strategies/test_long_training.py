"""No false alarm in long training: records, samples and warnings stay quiet where all is right.

FASTDIST_TEST_STEPS sets the number of steps of each model.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from contextlib import nullcontext

import cloudpickle
import fastdist as fd
import pytest
import torch
import torch.nn.functional as F
from fastdist import Strategy
from ranks import ProcessRanks
from replica_runs import ranks
from test_strategies import run_case
from torch import nn

__all__ = ["ranks"]  # a fixture

STEPS = int(os.environ.get("FASTDIST_TEST_STEPS", "300"))

Step = Callable[..., None]
Made = tuple[Step, tuple[torch.Tensor, ...]]


def rows(*shapes: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(61, *shape, generator=generator) for shape in shapes)


def perceptron(strategy: Strategy) -> Made:
    """Dropout, Adam, gradients that are clipped; the last batch is uneven."""
    with strategy.scope():
        model = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Dropout(0.2), nn.Linear(16, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step, rows((6,), (1,))


def convolutions(strategy: Strategy) -> Made:
    """BatchNorm, momentum, a schedule, and a loss that may leave out its backward on all."""
    with strategy.scope():
        inner = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten())
        model = nn.Sequential(inner, nn.Linear(4 * 16, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y[:, :3].argmax(1))
        replica = fd.get_replica_context()
        assert replica is not None
        if replica.all_reduce("max", loss.detach()) > 1.3:
            return
        loss.backward()
        optimizer.step()
        schedule.step()

    return step, rows((1, 6, 6), (3,))


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.head = nn.Linear(8, 9)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        predicted: torch.Tensor = self.head(self.layer(self.embedding(x)))
        return predicted


def transformer(strategy: Strategy) -> Made:
    """bfloat16, a mean over tokens, accumulation, and a weight that is known in the step."""
    with strategy.scope():
        model = Tokens()
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    count = [0]

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        count[0] += 1
        replica = fd.get_replica_context()
        assert replica is not None
        labels = torch.where(y > 0, y.clamp(0, 1).mul(8).long(), -100).squeeze(2)
        replica.weight((labels != -100).sum())
        with nullcontext() if count[0] % 2 == 0 else strategy.no_sync():
            with torch.autocast("cpu", torch.bfloat16):
                logits = model(x.squeeze(2).abs().clamp(0, 1).mul(8).long())
            F.cross_entropy(logits.float().flatten(0, 1), labels.flatten()).backward()
        if count[0] % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()

    return step, rows((5, 1), (5, 1))


@pytest.mark.slow
@pytest.mark.timeout(10_000)
@pytest.mark.parametrize("make", [perceptron, convolutions, transformer])
def test_no_false_alarm(ranks: ProcessRanks, make: Callable[[Strategy], Made]) -> None:
    def case(strategy: Strategy) -> None:
        torch.manual_seed(0)
        step, data = make(strategy)
        batches = strategy.distribute_dataset(data, global_batch_size=8, shuffle=True)
        done = 0
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            while done < STEPS:
                for batch in batches:
                    strategy.run(step, batch)
                    done += 1
        strategy.check_in_sync()

    limit_s = 60 + STEPS / 30
    ranks.run(run_case, cloudpickle.dumps(case), "mirrored", {}, limit_s=limit_s)
