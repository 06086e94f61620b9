"""Measures scheduled functions per second, and steps of small models on parameter servers.

    python benchmarks/coordinator.py [--workers 2] [--ps 1] [--seconds 3] [--json FILE]

Empty functions: functions per second, in the best of the rounds, and the round-trip time of one
function. Steps: an embedding of 100,000 rows of 64, an MLP of 0.1 M parameters, Adagrad, 256
examples of 8 ids per step; and a model of 150 tensors of at most 4 KB. Both models run on one
device with plain torch, and on the workers. Results are checked: every function has run, the loss
falls.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import fastdist as fd
import torch
from fastdist.cli.machine_facts import machine_facts
from torch import nn

_INSIDE = "FASTDIST_BENCHMARK_INSIDE"


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.EmbeddingBag(100_000, 64)
        self.dense = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 128))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.dense(self.rows(ids))


class Small(nn.Module):
    """A model of 75 layers with 150 tensors."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(75)]
        self.dense = nn.Sequential(*layers)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = torch.stack([(ids >> bit & 1).float() for bit in range(4)], -1).flatten(1)
        for layer in self.dense:
            x = x + layer(x)
        return x


def make(kind: type[nn.Module]) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = kind()
    return model, torch.optim.Adagrad(model.parameters(), lr=0.05 if kind is Model else 0.001)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    ids = torch.randint(0, 1000, (256, 8))
    optimizer.zero_grad()
    scores = model(ids)
    loss = nn.functional.cross_entropy(scores, ids[:, 0] % scores.shape[1])
    loss.backward()
    optimizer.step()
    return float(loss.detach())


def nothing() -> None:
    pass


def measure_nothing(coordinator: Any, seconds: float) -> dict[str, float]:
    rates = []
    deadline = time.perf_counter() + seconds
    while time.perf_counter() < deadline:
        began = time.perf_counter()
        for _ in range(2000):
            coordinator.schedule(nothing)
        coordinator.join()
        rates.append(2000 / (time.perf_counter() - began))
    alone = []
    for _ in range(200):
        began = time.perf_counter()
        coordinator.schedule(nothing).fetch()
        alone.append(time.perf_counter() - began)
    return {
        "noops_per_s": max(rates),
        "noops_per_s_p50": statistics.median(rates),
        "alone_us_p50": 1e6 * statistics.median(alone),
    }


def measure_steps(
    strategy: Any, coordinator: Any, seconds: float, kind: type[nn.Module]
) -> dict[str, float]:
    model, optimizer = make(kind)
    plain = []
    deadline = time.perf_counter() + seconds
    while time.perf_counter() < deadline:
        began = time.perf_counter()
        step(model, optimizer)
        plain.append(time.perf_counter() - began)
    with strategy.scope():
        served, served_optimizer = make(kind)

    def served_step() -> float:
        return step(served, served_optimizer)

    first = coordinator.schedule(served_step).fetch()
    count, began = 0, time.perf_counter()
    while time.perf_counter() - began < seconds:
        values = [coordinator.schedule(served_step) for _ in range(50)]
        coordinator.join()
        count += 50
    elapsed = time.perf_counter() - began
    last = values[-1].fetch()
    assert last < first, (first, last)
    return {
        "plain_steps_per_s": 1 / statistics.median(plain),
        "served_steps_per_s": count / elapsed,
        "first_loss": first,
        "last_loss": last,
    }


def inside(seconds: float, path: str) -> None:
    strategy = fd.ParameterServerStrategy()
    coordinator = fd.ClusterCoordinator(strategy)
    while len(coordinator.workers) < len(strategy.worker_addresses):
        time.sleep(0.01)
    figures: dict[str, Any] = dict(measure_nothing(coordinator, seconds))
    for kind in (Model, Small):
        measured = measure_steps(strategy, coordinator, seconds, kind)
        figures |= {f"{kind.__name__.lower()}_{name}": value for name, value in measured.items()}
    Path(path).write_text(json.dumps(figures))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--ps", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--json", type=Path, default=Path("coordinator.json"))
    options = parser.parse_args()
    if _INSIDE in os.environ:
        inside(options.seconds, os.environ[_INSIDE])
        return
    path = options.json.absolute()
    command = [sys.executable, "-m", "fastdist", "run"]
    command += ["--workers", str(options.workers), "--ps", str(options.ps)]
    command += [__file__, "--seconds", str(options.seconds)]
    environment = {**os.environ, _INSIDE: str(path), "OMP_NUM_THREADS": "1"}
    subprocess.run(command, check=True, env=environment)
    figures = json.loads(path.read_text())
    facts = {"workers": options.workers, "ps": options.ps, "machine": machine_facts()}
    path.write_text(json.dumps({**facts, **figures}, indent=1) + "\n")
    for name, value in figures.items():
        print(f"{name:20} {value:12.1f}")
    print("bar: 5,000 no-ops a second over 2 workers")


if __name__ == "__main__":
    main()
