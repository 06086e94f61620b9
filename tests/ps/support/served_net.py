"""A model with embedding rows, a tied weight and dense layers, for servers and for one device."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

F = nn.functional


class Net(nn.Module):
    """Embedding rows, a tied weight, and dense layers."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(40, 6)
        self.bags = nn.EmbeddingBag(30, 6, mode="sum")
        self.hidden = nn.Linear(12, 8)
        self.again = nn.Linear(8, 8)
        self.again.weight = nn.Parameter(torch.eye(8))
        self.out = nn.Linear(8, 8)
        self.out.weight = self.again.weight

    def forward(self, words: torch.Tensor, bags: torch.Tensor) -> torch.Tensor:
        joined = torch.cat([self.words(words).sum(1), self.bags(bags)], 1)
        return self.out(torch.tanh(self.again(torch.tanh(self.hidden(joined)))))


def batches(count: int, seed: int = 0) -> list[tuple[torch.Tensor, ...]]:
    generator = torch.Generator().manual_seed(seed)

    def numbers(limit: int, *shape: int) -> torch.Tensor:
        return torch.randint(0, limit, shape, generator=generator)

    return [(numbers(40, 12, 3), numbers(30, 12, 4), numbers(8, 12)) for _ in range(count)]


def step(model: Any, optimizer: Any, words: Any, bags: Any, labels: Any) -> float:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(words, bags), labels)
    loss.backward()
    optimizer.step()
    return float(loss.detach())


def make(strategy: Any, make_optimizer: Callable[[Any], Any]) -> tuple[Any, Any]:
    torch.manual_seed(0)
    with strategy.scope():
        model = Net()
        optimizer = make_optimizer(model.parameters())
    return model, optimizer


def reference(make_optimizer: Callable[[Any], Any]) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = Net()
    return model, make_optimizer(model.parameters())


def same(one: nn.Module, other: nn.Module, tolerance: float = 2e-6) -> None:
    values = one.state_dict()
    for name, value in other.state_dict().items():
        torch.testing.assert_close(values[name], value, atol=tolerance, rtol=tolerance, msg=name)


def adagrad(parameters: Any) -> Any:
    return torch.optim.Adagrad(parameters, lr=0.1)


def sgd(parameters: Any) -> Any:
    return torch.optim.SGD(parameters, lr=0.1)
