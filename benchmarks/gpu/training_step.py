"""A training step of one replica, by plain torch, DDP and MirroredStrategy, in one process.

    python benchmarks/gpu/training_step.py [--rounds 30]

The ways take turns in random order, a few steps each, so that changes on the machine affect all of
them. Each way has a model of its own with the same initial values; after the last round all must
have the same parameters. Prints a line of JSON for each model: milliseconds per step, the median of
the rounds. Without a GPU it runs small models on the CPU, with Gloo in place of NCCL, to show that
it works; those times mean nothing.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import random
import statistics
from collections.abc import Callable
from time import perf_counter
from typing import Any

import fastdist as fd
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

Step = Callable[[torch.Tensor, torch.Tensor], Any]
IS_GPU = torch.cuda.is_available()
DEVICE = "cuda:0" if IS_GPU else "cpu"
STEPS_OF_TURN = 4
WARM_UP = 8


def linear_layers() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """Return 20 linear layers, which keep the host busier than the GPU, and a batch."""
    layers: list[nn.Module] = []
    for _ in range(20):
        layers += [nn.Linear(512, 512), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(512, 10)), torch.randn(64, 512), torch.arange(64) % 10


def resnet50() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """Return ResNet-50 and 16 images."""
    from torchvision.models import resnet50

    return resnet50(), torch.randn(16, 3, 224, 224), torch.arange(16)


def small_cnn() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """Return a small CNN, in place of ResNet-50 without a GPU, and a batch."""
    layers = [nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 10)]
    return nn.Sequential(*layers), torch.randn(8, 1, 8, 8), torch.arange(8)


class Ways:
    """The same model, trained in several ways."""

    def __init__(self, model: nn.Module, groups: dict[str, Any]) -> None:
        self._initial = model.to(DEVICE)
        self._models: dict[str, nn.Module] = {}
        self.steps: dict[str, Step] = {"plain torch": self._step("plain torch")}
        for name, group in groups.items():
            self.steps[f"DDP, {name}"] = self._step(f"DDP, {name}", ddp_on=group)
        strategy = fd.MirroredStrategy([DEVICE])
        for name in ("MirroredStrategy", "MirroredStrategy, captured")[: 1 + IS_GPU]:
            with strategy.scope():
                step = self._step(name)
                strategy.mirror(self._models[name])
            if name.endswith("captured"):
                step = strategy.make_graphed(step)
            self.steps[name] = lambda x, y, step=step: strategy.run(step, args=(x, y))

    def _step(self, name: str, ddp_on: Any = "none") -> Step:
        model = self._models[name] = copy.deepcopy(self._initial)
        called = model if ddp_on == "none" else DistributedDataParallel(model, process_group=ddp_on)
        optimizer = torch.optim.SGD(model.parameters(), 0.001, momentum=0.9)

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(called(x), y)
            loss.backward()
            optimizer.step()
            return loss.detach()

        return step

    def check_equal(self) -> None:
        """Raise unless every way has moved the parameters as plain torch has."""
        start, plain, *others = map(flat, (self._initial, *self._models.values()))
        for name, other in zip(list(self._models)[1:], others, strict=True):
            gap = float((other - plain).norm() / (plain - start).norm())
            if not gap < 0.1:
                raise SystemExit(
                    f"{name}: the parameters are {gap:.2g} of their way off plain torch's"
                )


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def wait() -> None:
    if IS_GPU:
        torch.cuda.synchronize()


def measure(model: nn.Module, x: torch.Tensor, y: torch.Tensor, groups: Any, rounds: int) -> Any:
    """Return milliseconds per step for each way."""
    ways = Ways(model, groups)
    x, y = x.to(DEVICE), y.to(DEVICE)
    times: dict[str, list[float]] = {name: [] for name in ways.steps}
    for step in ways.steps.values():
        for _ in range(WARM_UP):
            step(x, y)
    wait()
    gc.collect()
    gc.disable()  # a collection would stop some way for as long as several steps
    order = list(ways.steps)
    for _ in range(rounds):
        random.shuffle(order)
        for name in order:
            step = ways.steps[name]
            start = perf_counter()
            for _ in range(STEPS_OF_TURN):
                step(x, y)
            wait()
            times[name].append((perf_counter() - start) / STEPS_OF_TURN * 1e3)
    gc.enable()
    ways.check_equal()
    return {name: round(statistics.median(each), 3) for name, each in times.items()}


def main() -> None:
    """Measure both models."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30)
    rounds = parser.parse_args().rounds
    torch.manual_seed(0)
    peer = "nccl" if IS_GPU else "gloo"
    dist.init_process_group(peer, store=dist.HashStore(), rank=0, world_size=1)
    groups = {peer.upper(): None, "fastdist": dist.new_group([0], backend="fastdist")}
    for make in (resnet50 if IS_GPU else small_cnn, linear_layers):
        figures = measure(*make(), groups, rounds)
        print(json.dumps({"model": make.__name__, "ms_per_step": figures}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
