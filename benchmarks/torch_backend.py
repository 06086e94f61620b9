"""Times torch.distributed on fastdist and on Gloo, in turn, in the same processes.

    OMP_NUM_THREADS=1 fastdist run -n 2 benchmarks/torch_backend.py

Prints one JSON object each for collectives, for training steps (DDP, FSDP2 and fastdist's own
strategy) and for making and leaving process groups. Times are medians of the slowest rank; every
rank writes its data before each call, and sums are checked.
"""

from __future__ import annotations

import argparse
import copy
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
from strategy_step import (
    Step,
    batch_of,
    cnn,
    measure,
    mlp,
    step_by_hand,
    strategy_step,
    train_step,
)
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

Groups = dict[str, dist.ProcessGroup]
SIZES = {"8 B": 2, "1 KiB": 256, "64 KiB": 1 << 14, "1 MiB": 1 << 18, "16 MiB": 1 << 22}
VOCABULARY, CONTEXT, WIDTH = 8000, 64, 512


def slowest(comm: fd.Communicator, seconds: float) -> float:
    """Return the time of the slowest rank."""
    took = np.array([seconds])
    comm.all_reduce(took, "max")
    return float(took[0])


def time_collectives(comm: fd.Communicator, groups: Groups) -> dict[str, Any]:
    """Return microseconds of `dist.all_reduce` by size and backend, and their ratio."""
    result: dict[str, Any] = {}
    for title, count in SIZES.items():
        calls = 400 if count <= 256 else 60 if count <= 1 << 18 else 12
        x = torch.empty(count)
        times: dict[str, list[float]] = {name: [] for name in groups}
        for _ in range(6):
            for name, group in groups.items():
                comm.barrier()
                for _ in range(calls):
                    x.fill_(comm.rank + 1.0)
                    begin = time.perf_counter()
                    dist.all_reduce(x, group=group)
                    times[name].append(time.perf_counter() - begin)
                assert bool((x == comm.world_size * (comm.world_size + 1) / 2).all())
        us = {
            name: round(1e6 * slowest(comm, statistics.median(values)), 1)
            for name, values in times.items()
        }
        result[title] = {**us, "faster": round(us["gloo"] / us["fastdist"], 1)}
    return result


def ddp_step(make: Callable[[], nn.Module], batch: Any, group: dist.ProcessGroup) -> Step:
    """Return a step under DDP over this group."""
    model = DistributedDataParallel(make(), process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return lambda: train_step(model, optimizer, *batch)


class Transformer(nn.Module):
    """A language model with 24 million parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 8, 2048, dropout=0.0, batch_first=True)
            for _ in range(5)
        )
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def fsdp_step(model: Transformer, tokens: torch.Tensor, group: dist.ProcessGroup) -> Step:
    """Return a step of a copy of the model under FSDP2 over this group."""
    model = copy.deepcopy(model)
    mesh = DeviceMesh.from_group(group, "cpu")
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def ratios(ms: dict[str, float]) -> dict[str, float]:
    """Return the ratios with bars."""
    found = {"of gloo": round(ms["fastdist"] / ms["gloo"], 3)}
    if "strategy" in ms:
        found["of the strategy"] = round(ms["fastdist"] / ms["strategy"], 3)
    return found


def time_steps(comm: fd.Communicator, groups: Groups, options: argparse.Namespace) -> None:
    """Print the times of training steps."""
    strategy = fd.MirroredStrategy()
    for name, make in (("cnn", cnn), ("mlp", mlp)):
        batch = batch_of(name, comm.rank)
        ways = {backend: ddp_step(make, batch, group) for backend, group in groups.items()}
        ways |= {
            "strategy": strategy_step(strategy, make, batch),
            "by hand": step_by_hand(comm, make, batch),
        }
        ms = measure(comm, ways, options.rounds, options.steps)
        if comm.rank == 0:
            print(json.dumps({"ddp": name, "ms": ms, **ratios(ms)}), flush=True)
    torch.manual_seed(0)
    model = Transformer()
    count = sum(p.numel() for p in model.parameters())
    tokens = torch.randint(0, VOCABULARY, (2, CONTEXT))
    ways = {backend: fsdp_step(model, tokens, group) for backend, group in groups.items()}
    ms = measure(comm, ways, options.rounds, max(2, options.steps // 3))
    if comm.rank == 0:
        print(json.dumps({"fsdp2": f"{count / 1e6:.1f} M", "ms": ms, **ratios(ms)}), flush=True)


def time_groups(comm: fd.Communicator, store: Any) -> dict[str, Any]:
    """Return milliseconds of init_process_group and destroy_process_group, on a store."""
    result: dict[str, Any] = {}
    for name in ("gloo", "fastdist"):
        inits, ends = [], []
        for number in range(12):
            own = dist.PrefixStore(f"{name}/{number}", store)
            comm.barrier()
            begin = time.perf_counter()
            dist.init_process_group(name, store=own, rank=comm.rank, world_size=comm.world_size)
            inits.append(slowest(comm, time.perf_counter() - begin))
            begin = time.perf_counter()
            dist.destroy_process_group()
            ends.append(slowest(comm, time.perf_counter() - begin))
        times = {"init": inits, "destroy": ends}
        result[name] = {what: round(1e3 * statistics.median(t), 1) for what, t in times.items()}
    return result


def main() -> None:
    """Print everything, or the parts that are named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--only", choices=["collectives", "steps", "groups"])
    options = parser.parse_args()
    comm = fd.init()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = comm.broadcast_object(free.getsockname()[1])
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    store = dist.TCPStore("127.0.0.1", port, comm.world_size, comm.rank == 0)
    place = {"rank": comm.rank, "world_size": comm.world_size}
    if options.only in (None, "groups"):
        times = time_groups(comm, store)
        if comm.rank == 0:
            print(json.dumps({"process groups, ms": times}), flush=True)
    dist.init_process_group("gloo", store=dist.PrefixStore("timed", store), **place)
    groups: Groups = {name: dist.new_group(backend=name) for name in ("gloo", "fastdist")}
    if options.only in (None, "collectives"):
        times = time_collectives(comm, groups)
        if comm.rank == 0:
            print(json.dumps({"all_reduce, us": times}), flush=True)
    if options.only in (None, "steps"):
        time_steps(comm, groups, options)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
