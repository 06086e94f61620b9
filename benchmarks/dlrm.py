"""Measures the processor time of a DLRM's batch: parameter servers, TorchRec and DDP.

    pip install --no-deps torchrec==1.8.0 fbgemm-gpu-cpu==1.8.0
    pip install tensordict iopath pyre-extensions
    python benchmarks/dlrm.py [--rows 100000] [--batches 400] [--rounds 2]

Two processes of one machine train on random batches of 512 examples with 14 categories of --rows
rows each. DDP and TorchRec run over Gloo, parameter servers over sockets in a private folder, and
by TCP with keys, as between machines. The jobs take turns. A time covers all processes of a job. It
is the difference between a long and a short job, so that the start does not count.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import fastdist as fd
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

CATEGORIES, NUMBERS, DIM, BATCH, LR = 14, 9, 16, 512, 0.05
FEW = 20  # batches of the short job
PYTHON = [sys.executable, "-m"]
SERVERS = [*PYTHON, "fastdist", "run", "--no-prefix", "--workers", "2", "--ps", "2"]
JOBS = {
    "servers": SERVERS,
    "encrypted": [*SERVERS, "--env", "FASTDIST_PS_FOLDER="],  # TCP with keys
    "torchrec": [*PYTHON, "torch.distributed.run", "--nproc-per-node", "2"],
    "ddp": [*PYTHON, "torch.distributed.run", "--nproc-per-node", "2"],
}


def perceptron(*widths: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class Dense(nn.Module):
    """The part of a DLRM without embeddings."""

    def __init__(self) -> None:
        super().__init__()
        vectors = 1 + CATEGORIES
        self.bottom = perceptron(NUMBERS, 64, DIM)
        self.top = perceptron(DIM + vectors * (vectors - 1) // 2, 64, 32, 1)
        self.pairs = torch.triu_indices(vectors, vectors, 1).tolist()

    def forward(self, numbers: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        dense = F.relu(self.bottom(numbers))
        vectors = torch.cat([dense[:, None], rows], 1)
        first, second = self.pairs
        dots = (vectors @ vectors.transpose(1, 2))[:, first, second]
        return self.top(torch.cat([dense, dots], 1))[:, 0]


class Dlrm(nn.Module):
    def __init__(self, embeddings: nn.Module) -> None:
        super().__init__()
        self.embeddings = embeddings
        self.dense = Dense()

    def forward(self, numbers: torch.Tensor, ids: Any) -> torch.Tensor:
        return self.dense(numbers, self.embeddings(ids))


def batches(rows: int, seed: int) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yield numbers, ids from 0 to CATEGORIES × rows, and labels."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        ids = torch.randint(rows, (BATCH, CATEGORIES), generator=generator)
        labels = torch.randint(2, (BATCH,), generator=generator).float()
        yield (
            torch.randn(BATCH, NUMBERS, generator=generator),
            ids + torch.arange(CATEGORIES) * rows,
            labels,
        )


def take_step(model: nn.Module, optimizers: list[Any], batch: tuple[Any, ...]) -> None:
    numbers, ids, labels = batch
    for optimizer in optimizers:
        optimizer.zero_grad()
    F.binary_cross_entropy_with_logits(model(numbers, ids), labels).backward()
    for optimizer in optimizers:
        optimizer.step()


def servers(rows: int, count: int) -> None:
    strategy = fd.ParameterServerStrategy()
    coordinator = fd.ClusterCoordinator(strategy)
    with strategy.scope():
        model = Dlrm(fd.nn.Embedding(None, DIM))
        optimizers = [
            fd.ps.RowWiseAdagrad(model.embeddings.parameters(), lr=LR),
            torch.optim.Adam(model.dense.parameters()),
        ]

    def step(data: Any) -> None:
        take_step(model, optimizers, next(data))

    data = coordinator.create_per_worker_dataset(lambda: batches(rows, fd.get_worker_index()))
    iterator = iter(data)
    for _ in range(count):
        coordinator.schedule(step, (iterator,))
    coordinator.join()


def ddp(rows: int, count: int) -> None:
    dist.init_process_group("gloo")
    model = Dlrm(nn.Embedding(CATEGORIES * rows, DIM))
    optimizers = [
        torch.optim.Adagrad(model.embeddings.parameters(), lr=LR),
        torch.optim.Adam(model.dense.parameters()),
    ]
    wrapped = nn.parallel.DistributedDataParallel(model)
    data = batches(rows, dist.get_rank())
    for _ in range(count // 2):
        take_step(wrapped, optimizers, next(data))
    dist.destroy_process_group()


class Tables(nn.Module):
    """One of TorchRec's tables for each category."""

    def __init__(self, rows: int) -> None:
        from torchrec import EmbeddingBagCollection, EmbeddingBagConfig

        super().__init__()
        self.tables = EmbeddingBagCollection(
            tables=[
                EmbeddingBagConfig(
                    name=f"table{i}",
                    embedding_dim=DIM,
                    num_embeddings=rows,
                    feature_names=[f"feature{i}"],
                )
                for i in range(CATEGORIES)
            ]
        )

    def forward(self, ids: Any) -> torch.Tensor:
        return self.tables(ids).values().view(-1, CATEGORIES, DIM)


def torchrec(rows: int, count: int) -> None:
    from torch.distributed.optim import _apply_optimizer_in_backward
    from torchrec import KeyedJaggedTensor
    from torchrec.distributed import DistributedModelParallel
    from torchrec.optim import RowWiseAdagrad

    dist.init_process_group("gloo")
    model = Dlrm(Tables(rows))
    _apply_optimizer_in_backward(RowWiseAdagrad, model.embeddings.parameters(), {"lr": LR})
    wrapped = DistributedModelParallel(model, device=torch.device("cpu"))
    dense = [value for name, value in wrapped.named_parameters() if ".dense." in f".{name}"]
    optimizers = [torch.optim.Adam(dense)]
    names = [f"feature{i}" for i in range(CATEGORIES)]
    lengths = torch.ones(BATCH * CATEGORIES, dtype=torch.int32)
    data = batches(rows, dist.get_rank())
    for _ in range(count // 2):
        numbers, ids, labels = next(data)
        own = (ids - torch.arange(CATEGORIES) * rows).T.reshape(-1)
        jagged = KeyedJaggedTensor.from_lengths_sync(names, own, lengths)
        take_step(wrapped, optimizers, (numbers, jagged, labels))
    dist.destroy_process_group()


def seconds(job: str, rows: int, count: int) -> tuple[float, float]:
    """Run a job; return its processor time and its time on the clock."""

    def processor() -> float:
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return used.ru_utime + used.ru_stime

    before, began = processor(), time.perf_counter()
    command = [*JOBS[job], __file__, "--job", job, "--rows", str(rows), "--batches", str(count)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{job} failed:\n{done.stderr[-4000:]}")
    return processor() - before, time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rows", type=int, default=1000, help="rows of each category")
    parser.add_argument("--batches", type=int, default=800, help="batches of the long job")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--job", choices=JOBS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job:
        train = {"torchrec": torchrec, "ddp": ddp}.get(options.job, servers)
        return train(options.rows, options.batches)
    for _ in range(options.rounds):
        for job in JOBS:
            short, long = (seconds(job, options.rows, n) for n in (FEW, options.batches))
            each = [
                1e3 * (b - a) / (options.batches - FEW) for a, b in zip(short, long, strict=True)
            ]
            print(
                f"{job:>9}: processor {each[0]:6.1f} ms a batch, clock {each[1]:6.1f}", flush=True
            )


if __name__ == "__main__":
    main()
