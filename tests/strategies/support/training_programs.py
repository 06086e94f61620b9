"""The list of programs for training, and the parts they share.

A program makes its modules in the strategy's scope, trains three steps, the last batch uneven, and
returns what must be the same however many replicas there are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from digits_training import batch
from fastdist import Strategy
from torch import nn

Program = Callable[[Strategy], list[torch.Tensor]]
PROGRAMS: list[Program] = []


def program(function: Program) -> Program:
    PROGRAMS.append(function)
    return function


def step_program(step: Callable[..., Any]) -> Program:
    """Add the program that trains a `Net` by `step(model, optimizer, x, y)`."""

    @functools.wraps(step)
    def by_steps(strategy: Strategy) -> list[torch.Tensor]:
        model, optimizer = made(strategy)
        return trained(strategy, functools.partial(step, model, optimizer), model)

    return program(by_steps)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.second = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)))


def steps(strategy: Strategy, step: Any) -> Iterator[Any]:
    """Runs `step(x, y)` on each of three batches; what it returns."""
    generator = torch.Generator().manual_seed(2)
    for size in (12, 12, 7):
        x = torch.randn(size, 6, generator=generator)
        y = torch.randn(size, 2, generator=generator)
        yield strategy.run(step, args=batch(strategy, x, y))


def finish(strategy: Strategy, *models: nn.Module) -> list[torch.Tensor]:
    strategy.check_in_sync()
    return [p.detach().clone().float() for model in models for p in model.parameters()]


def made(strategy: Strategy, make: Any = Net, optimizer: Any = None) -> Any:
    torch.manual_seed(1)
    optimizer = optimizer or functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    with strategy.scope():
        model = make()
        return model, optimizer(model.parameters())


def train(
    model: Any, optimizer: Any, x: torch.Tensor, y: torch.Tensor, loss_of: Any = F.mse_loss
) -> None:
    optimizer.zero_grad()
    loss_of(model(x), y).backward()
    optimizer.step()


def simple(strategy: Strategy, model: Any, optimizer: Any, loss_of: Any = F.mse_loss) -> None:
    for _ in steps(strategy, functools.partial(train, model, optimizer, loss_of=loss_of)):
        pass


def trained(strategy: Strategy, step: Any, *models: nn.Module) -> list[torch.Tensor]:
    for _ in steps(strategy, step):
        pass
    return finish(strategy, *models)


def simply_trained(strategy: Strategy, model: Any, optimizer: Any) -> list[torch.Tensor]:
    simple(strategy, model, optimizer)
    return finish(strategy, model)
