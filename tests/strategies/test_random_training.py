"""Random models, data, losses, optimizers and options: replicas train as one device does."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from typing import Any

import fastdist as fd
import pytest
import torch
import torch.nn.functional as F
from digits_training import require_close
from fastdist import Strategy
from replica_runs import Run, ranks, run
from torch import nn

__all__ = ["ranks", "run"]  # fixtures

PROGRAMS = 24
LOSSES = "mean", "sum", "weights", "classes"  # by turns
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05),
    "momentum": lambda p: torch.optim.SGD(p, 0.05, 0.9, weight_decay=1e-3, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01),
}


class Branches(nn.Module):
    """Uses another layer in every third call, and leaves one out."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        result: torch.Tensor = self.layers[self.calls % 3 == 0](x)
        return result


def model_of(draw: random.Random, width: int, outputs: int) -> nn.Module:
    layers: list[nn.Module] = []
    for _ in range(draw.randint(1, 3)):
        kind = draw.choice(["linear", "linear", "branches", "norm", "weight norm", "tied"])
        if kind == "linear":
            after = draw.choice([3, 8, 17])
            layers += [nn.Linear(width, after, bias=draw.random() < 0.7), nn.Tanh()]
            width = after
        elif kind == "branches":
            layers.append(Branches(width))
        elif kind == "norm":
            layers.append(nn.LayerNorm(width))
        elif kind == "weight norm":
            layers.append(nn.utils.parametrizations.weight_norm(nn.Linear(width, width)))
        else:
            layers += [nn.Linear(width, width), nn.Tanh()]
            layers.append(layers[-2])
    model = nn.Sequential(*layers, nn.Linear(width, outputs)).double()
    if draw.random() < 0.3:
        draw.choice(list(model.parameters())).requires_grad_(False)
    return model


def trained(strategy: Strategy, seed: int) -> list[torch.Tensor]:
    """Return the losses of the global batches, and the parameters after training."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    width, outputs, count = draw.choice([2, 4, 9]), draw.choice([2, 3]), draw.choice([1, 5, 16, 33])
    kind = LOSSES[seed % len(LOSSES)]
    with strategy.scope():
        model = model_of(draw, width, outputs)
        optimizer = OPTIMIZERS[draw.choice(list(OPTIMIZERS))](model.parameters())
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    clip, every = draw.choice([None, "norm", "value"]), draw.choice([1, 1, 2, 3])
    x, y = torch.randn(count, width).double(), torch.randn(count, outputs).double()
    weights, classes = torch.rand(count).double(), torch.randint(outputs, (count,))
    batches = strategy.distribute_dataset(
        (x, y, weights, classes),
        global_batch_size=draw.choice([2, 5, 16]),
        shuffle=draw.random() < 0.5,
        seed=seed,
    )

    def step(
        x: torch.Tensor, y: torch.Tensor, weights: torch.Tensor, classes: torch.Tensor, number: int
    ) -> torch.Tensor:
        out = model(x)
        if kind == "classes":
            losses = F.cross_entropy(out, classes, reduction="none")
        else:
            losses = (out - y).square().mean(1)
        losses = losses * weights if kind == "weights" else losses
        loss = losses.sum() if kind == "sum" else losses.mean()
        loss.backward()
        if number % every == 0:
            if clip == "norm":
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            elif clip == "value":
                nn.utils.clip_grad_value_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()

    found, number = [], 0
    op: Any = "sum" if kind == "sum" else "mean"
    for _ in range(3):
        for batch in batches:
            number += 1
            found.append(strategy.reduce(op, strategy.run(step, (*batch, number))))
        scheduler.step()
    strategy.check_in_sync()
    return [*map(torch.as_tensor, found), *(p.detach().clone() for p in model.parameters())]


def options_of(seed: int) -> fd.CommunicationOptions:
    draw = random.Random(seed)
    return fd.CommunicationOptions(
        gradient_reduction="sum" if LOSSES[seed % len(LOSSES)] == "sum" else "mean",
        bucket_bytes=draw.choice([64, 1 << 20]),
        overlap=draw.choice([True, False, "auto"]),
        shard_optimizer=draw.random() < 0.3,
    )


@pytest.mark.slow
def test_programs(run: Run) -> None:
    def case(_: Strategy) -> None:
        warnings.simplefilter("ignore")  # of sums over examples
        for seed in range(PROGRAMS):
            one = trained(fd.OneDeviceStrategy("cpu"), seed)
            strategy = fd.MirroredStrategy(options=options_of(seed))
            require_close(trained(strategy, seed), one, 1e-9)

    run(case)
