"""Times training steps with optimizers whose states are divided among ranks.

    fastdist run -n 2 benchmarks/sharded_optimizer.py          all: 15 minutes
    fastdist run -n 2 benchmarks/sharded_optimizer.py muon     one of adam, fused, muon
    fastdist run -n 1 --nnodes 2 ... sharded_optimizer.py overlap    on each of two machines

All ways take turns in one run, on the same data: a strategy with and without `shard_optimizer`, DDP
on fastdist with and without `fd.ShardedOptimizer`, and DDP on Gloo with torch's
ZeroRedundancyOptimizer. Prints milliseconds per step and per step of the optimizer (p50 of the
slowest rank), and the part of the optimizer's state on the rank with the most. "overlap" compares,
for Muon on 16 layers, parameters that are sent after the step with some that are sent during it.
"""

from __future__ import annotations

import itertools
import json
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import fastdist as fd
import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

STEPS = 4
# With the rounds: a step of Muon takes seconds.
CLASSES: dict[str, tuple[Callable[..., torch.optim.Optimizer], dict[str, Any], int]] = {
    "adam": (torch.optim.Adam, {"lr": 1e-4}, 10),
    "fused": (torch.optim.Adam, {"lr": 1e-4, "fused": True}, 10),
    "muon": (torch.optim.Muon, {"lr": 1e-3}, 1),
}


def perceptron() -> nn.Module:
    torch.manual_seed(0)
    sizes = (784, 3000, 3000, 2500, 10)
    layers = [nn.Linear(m, n, bias=False) for m, n in itertools.pairwise(sizes)]
    return nn.Sequential(
        *(part for layer in layers[:-1] for part in (layer, nn.ReLU())), layers[-1]
    )


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    tensors = (value for state in optimizer.state.values() for value in state.values())
    return sum(t.numel() * t.element_size() for t in tensors if isinstance(t, torch.Tensor))


class Way:
    """A way to train: its step, the optimizer, and the times of the optimizer's steps."""

    def __init__(self, optimizer: Any, model: nn.Module, batch: Any, call: Any = None) -> None:
        self.optimizer = getattr(optimizer, "optim", optimizer)  # ZeroRedundancyOptimizer's own
        self.stepping: list[float] = []
        self.times: list[float] = []
        x, y = batch

        def step() -> None:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            begin = time.perf_counter()
            optimizer.step()
            self.stepping.append(1e3 * (time.perf_counter() - begin))

        self.step = step if call is None else lambda: call(step)


def ways(
    comm: fd.Communicator, kind: str, batch: Any, gloo: Any, own: Any
) -> Iterator[tuple[str, Way]]:
    make, settings, _ = CLASSES[kind]
    for sharded in (False, True):
        options = fd.CommunicationOptions(shard_optimizer=sharded)
        strategy = fd.MirroredStrategy(options=options)
        with strategy.scope():
            model = perceptron()
            optimizer = make(model.parameters(), **settings)
        call = strategy.run
        yield f"strategy, {'sharded' if sharded else 'whole'}", Way(optimizer, model, batch, call)
    for sharded in (False, True):
        model = DistributedDataParallel(perceptron(), process_group=own)
        optimizer = (
            fd.ShardedOptimizer(make, model.parameters(), group=own, **settings)
            if sharded
            else make(model.parameters(), **settings)
        )
        yield f"DDP on fastdist, {'sharded' if sharded else 'whole'}", Way(optimizer, model, batch)
    model = DistributedDataParallel(perceptron(), process_group=gloo)
    yield "DDP on Gloo, whole", Way(make(model.parameters(), **settings), model, batch)
    model = DistributedDataParallel(perceptron(), process_group=gloo)
    zero = ZeroRedundancyOptimizer(
        model.parameters(), optimizer_class=make, process_group=gloo, **settings
    )
    yield "DDP on Gloo, ZeroRedundancyOptimizer", Way(zero, model, batch)


def p50(comm: fd.Communicator, times: list[float]) -> float:
    """Return the median over steps of the slowest rank's time."""
    return round(statistics.median(comm.all_reduce(np.array(times), "max").tolist()), 2)


def measure(comm: fd.Communicator, kind: str, gloo: Any, own: Any) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(comm.rank)
    batch = torch.randn(32, 784, generator=generator), torch.randint(10, (32,), generator=generator)
    all_ways = dict(ways(comm, kind, batch, gloo, own))
    for way in all_ways.values():
        way.step()
        way.stepping.clear()
    for _ in range(CLASSES[kind][2]):
        for way in all_ways.values():
            comm.barrier()
            for _ in range(STEPS):
                begin = time.perf_counter()
                way.step()
                way.times.append(1e3 * (time.perf_counter() - begin))
    elements = sum(p.numel() for p in perceptron().parameters())
    whole = elements * 4 * (1 if kind == "muon" else 2)
    rows = {}
    for name, way in all_ways.items():
        most = comm.all_reduce(np.array([state_bytes(way.optimizer)]), "max")[0]
        rows[name] = {
            "ms per step": p50(comm, way.times),
            "of them the optimizer's": p50(comm, way.stepping),
            "part of the state": round(float(most) / whole, 3),
        }
    return rows


def measure_overlap(comm: fd.Communicator) -> dict[str, float]:
    """Return the optimizer's milliseconds per step: whole, and sharded with and without overlap."""
    generator = torch.Generator().manual_seed(comm.rank)
    batch = torch.randn(8, 1024, generator=generator), torch.zeros(8, dtype=torch.int64)
    found: dict[str, Way] = {}
    for name, settings in (
        ("whole", {}),
        ("sharded", {"shard_optimizer": True, "overlap": False}),
        ("sharded, overlapped", {"shard_optimizer": True, "overlap": True}),
    ):
        options = fd.CommunicationOptions(**settings)
        strategy = fd.MultiWorkerMirroredStrategy(options=options)
        with strategy.scope():
            torch.manual_seed(0)
            model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(16)))
            optimizer = torch.optim.Muon(model.parameters(), lr=1e-3)
        found[name] = Way(optimizer, model, batch, strategy.run)
    for _ in range(1 + 2 * STEPS):
        for way in found.values():
            comm.barrier()
            way.step()
    return {name: p50(comm, way.stepping[1:]) for name, way in found.items()}


def main() -> None:
    comm = fd.init()
    if sys.argv[1:] == ["overlap"]:
        rows = measure_overlap(comm)
        if comm.rank == 0:
            print(json.dumps(rows, indent=1), flush=True)
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = comm.broadcast_object(free.getsockname()[1])
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=comm.rank, world_size=comm.world_size)
    own = dist.new_group(backend="fastdist")
    for kind in sys.argv[1:] or CLASSES:
        rows = measure(comm, kind, dist.group.WORLD, own)
        if comm.rank == 0:
            print(json.dumps({kind: rows}, indent=1), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
