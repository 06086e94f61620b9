"""Cases of torch.compile around collectives, for test_torch_backend.py: three or more calls each.

Each returns what it computed for each compiler; Gloo's groups must give the same.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

CALLS = 4
COMPILERS = ("eager", "aot_eager", "inductor")
Model = Callable[[torch.Tensor], torch.Tensor]


def batch(turn: int) -> torch.Tensor:
    numbers = torch.Generator().manual_seed(100 * turn + dist.get_rank())
    return torch.randn(8, 16, generator=numbers)


def net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))


def trained(parameters: list[nn.Parameter], step: Callable[[torch.Tensor], Any]) -> list[Any]:
    """Return the losses of some steps, to the digits that compilers agree on."""
    optimizer = torch.optim.SGD(parameters, 0.05)
    losses = []
    for turn in range(CALLS):
        optimizer.zero_grad()
        loss = step(batch(turn))
        loss.backward()
        optimizer.step()
        losses.append(round(float(loss.detach()), 5))
    return losses


def each(case: Callable[[str], Any]) -> Callable[[], Any]:
    """Return the case for every compiler."""

    def run() -> Any:
        results = []
        for compiler in COMPILERS:
            torch._dynamo.reset()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of torch about torch
                results.append(case(compiler))
        return results

    run.__name__ = case.__name__
    return run


@each
def compiled_ddp(compiler: str) -> Any:
    model = DistributedDataParallel(net())
    compiled: Model = torch.compile(model, backend=compiler)
    return trained(list(model.parameters()), lambda x: compiled(x).square().mean())


@each
def ddp_of_a_compiled_model(compiler: str) -> Any:
    model = DistributedDataParallel(torch.compile(net(), backend=compiler))
    return trained(list(model.parameters()), lambda x: model(x).square().mean())


@each
def compiled_step_with_ddp(compiler: str) -> Any:
    model = DistributedDataParallel(net())

    @torch.compile(backend=compiler)
    def loss_of(x: torch.Tensor) -> torch.Tensor:
        return (model(x * 2) + 1).square().mean()

    return trained(list(model.parameters()), loss_of)


@each
def compiled_fsdp(compiler: str) -> Any:
    model = net()
    for layer in model.children():
        fully_shard(layer)
    fully_shard(model)
    compiled: Model = torch.compile(model, backend=compiler)
    return trained(list(model.parameters()), lambda x: compiled(x).square().mean())


@each
def compiled_asynchronous_call(compiler: str) -> Any:
    @torch.compile(backend=compiler)
    def step(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        work = dist.all_reduce(y, async_op=True)
        z = x + 1
        work.wait()
        return y + z

    return [round(float(step(batch(turn)).sum()), 3) for turn in range(CALLS)]


@each
def compiled_messages(compiler: str) -> Any:
    size, rank = dist.get_world_size(), dist.get_rank()

    @torch.compile(backend=compiler)
    def step(x: torch.Tensor) -> torch.Tensor:
        y, got = x * 2, torch.zeros_like(x)
        if rank == 0:
            dist.send(y, 1)
            dist.recv(got, size - 1)
        else:
            dist.recv(got, rank - 1)
            dist.send(y + got, (rank + 1) % size)
        return got + y

    return [round(float(step(batch(turn)).sum()), 3) for turn in range(CALLS)]


CASES = (
    compiled_ddp,
    ddp_of_a_compiled_model,
    compiled_step_with_ddp,
    compiled_fsdp,
    compiled_asynchronous_call,
    compiled_messages,
)
