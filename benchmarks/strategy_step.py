"""Times training steps under strategies, next to plain torch and DistributedDataParallel.

    fastdist run -n 2 benchmarks/strategy_step.py        strategies, by hand, DDP, independent
    python benchmarks/strategy_step.py                   one replica, and plain torch

All ways take turns in one run, on the same data. Prints one JSON object per model: milliseconds
per step (p50 of the slowest rank) and the ratios with bars.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import socket
import statistics
import time
from collections.abc import Callable
from typing import Any

import fastdist as fd
import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

Step = Callable[[], object]


def cnn() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Conv2d(16, 32, 3), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(4608, 128), nn.ReLU(), nn.Linear(128, 10)),
    )


def mlp() -> nn.Module:
    return nn.Sequential(
        *(nn.Linear(784, 3000), nn.ReLU(), nn.Linear(3000, 3000), nn.ReLU()),
        *(nn.Linear(3000, 2500), nn.ReLU(), nn.Linear(2500, 10)),
    )


def batch_of(name: str, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shape = (64, 1, 28, 28) if name == "cnn" else (32, 784)
    x = torch.randn(shape, generator=generator)
    return x, torch.randint(0, 10, (shape[0],), generator=generator)


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Any, y: Any) -> torch.Tensor:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    return loss.detach()


def plain_step(make: Callable[[], nn.Module], batch: Any) -> Step:
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return lambda: train_step(model, optimizer, *batch)


def ddp_step(make: Callable[[], nn.Module], batch: Any) -> Step:
    model = DistributedDataParallel(make())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return lambda: train_step(model, optimizer, *batch)


def step_by_hand(comm: fd.Communicator, make: Callable[[], nn.Module], batch: Any) -> Step:
    """One fused all_reduce of all gradients after backward."""
    model = make()
    comm.broadcast([parameter.detach() for parameter in model.parameters()])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(batch[0]), batch[1])
        loss.backward()
        comm.all_reduce([parameter.grad for parameter in model.parameters()], op="mean")
        optimizer.step()
        return loss.detach()

    return step


def strategy_step(strategy: fd.Strategy, make: Callable[[], nn.Module], batch: Any) -> Step:
    with strategy.scope():
        model = make()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x, y = (fd.PerReplica((leaf,)) for leaf in batch)
    return lambda: strategy.run(train_step, args=(model, optimizer, x, y))


def data_step(strategy: fd.Strategy, make: Callable[[], nn.Module], batch: Any) -> Step:
    """The same on batches of a shuffled dataset, cut anew for every step."""
    with strategy.scope():
        model = make()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    size = len(batch[0]) * strategy.num_replicas_in_sync
    arrays = tuple(torch.cat([leaf] * 32 * strategy.num_replicas_in_sync) for leaf in batch)
    batches = strategy.distribute_dataset(arrays, global_batch_size=size, shuffle=True)
    source = itertools.chain.from_iterable(itertools.repeat(batches))
    return lambda: strategy.run(lambda b: train_step(model, optimizer, *b), args=(next(source),))


def measure(comm: fd.Communicator, ways: dict[str, Step], rounds: int, steps: int) -> Any:
    """p50 over steps of the slowest rank's time in ms, for each way."""
    times: dict[str, list[float]] = {way: [] for way in ways}
    for step in ways.values():
        for _ in range(3):
            step()
    for _ in range(rounds):
        for way, step in ways.items():
            comm.barrier()
            for _ in range(steps):
                begin = time.perf_counter()
                step()
                took = np.array([time.perf_counter() - begin])
                comm.all_reduce(took, "max")
                times[way].append(1e3 * float(took[0]))
    return {way: round(statistics.median(values), 3) for way, values in times.items()}


def overhead_us(strategy: fd.Strategy) -> float:
    """Returns the time of `run` and `reduce` for an empty step."""
    value = torch.tensor(1.0)
    times = []
    for _ in range(2000):
        begin = time.perf_counter()
        strategy.reduce("mean", strategy.run(lambda: value))
        times.append(time.perf_counter() - begin)
    return round(1e6 * statistics.median(times), 1)


def by_processes(comm: fd.Communicator, options: argparse.Namespace) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = comm.broadcast_object(free.getsockname()[1])
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=comm.rank, world_size=comm.world_size)
    for name, make in (("cnn", cnn), ("mlp", mlp)):
        strategy, central = fd.MirroredStrategy(), fd.CentralStorageStrategy()
        batch = batch_of(name, comm.rank)
        ways = {
            "fastdist": strategy_step(strategy, make, batch),
            "by hand": step_by_hand(comm, make, batch),
            "central storage": strategy_step(central, make, batch),
            "ddp": ddp_step(make, batch),
            "independent": plain_step(make, batch),
            "on a dataset": data_step(strategy, make, batch_of(name, 0)),
        }
        ms = measure(comm, ways, options.rounds, options.steps)
        strategy.check_in_sync()
        if comm.rank == 0:
            ratios = {
                "of ddp": round(ms["fastdist"] / ms["ddp"], 3),
                "of by hand": round(ms["fastdist"] / ms["by hand"], 3),
                "central of mirrored": round(ms["central storage"] / ms["fastdist"], 3),
                "throughput of independent": round(ms["independent"] / ms["fastdist"], 3),
                "cost of the dataset": round(ms["on a dataset"] / ms["fastdist"] - 1, 3),
            }
            print(json.dumps({"model": name, "ranks": comm.world_size, "ms": ms, **ratios}))
    overhead = overhead_us(strategy)
    if comm.rank == 0:
        print(json.dumps({"run and reduce of nothing, us": overhead}))
    dist.destroy_process_group()


def alone(comm: fd.Communicator, options: argparse.Namespace) -> None:
    for name, make in (("cnn", cnn), ("mlp", mlp)):
        one = fd.MirroredStrategy(["cpu"])
        batch = batch_of(name, 0)
        ways = {"one replica": strategy_step(one, make, batch), "plain": plain_step(make, batch)}
        ms = measure(comm, ways, options.rounds, options.steps)
        of_plain = round(ms["one replica"] / ms["plain"], 3)
        print(json.dumps({"model": name, "ms": ms, "one replica of plain": of_plain}))
    print(json.dumps({"run and reduce of nothing, us": overhead_us(one)}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=12)
    options = parser.parse_args()
    comm = fd.init()
    if comm.world_size > 1:
        by_processes(comm, options)
    else:
        alone(comm, options)


if __name__ == "__main__":
    main()
