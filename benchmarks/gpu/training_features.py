"""Features of training beside steps, on a GPU: each part checks its own results.

    fastdist run --no-prefix -n N benchmarks/gpu/training_features.py [PART...]     N = 1 or 2

Checkpoints that are saved while training goes on, mixed precision, torch.compile, and groups of
collectives. Prints a line of JSON for each part. Without a GPU the replicas are on the CPU.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable
from time import monotonic
from typing import Any

import fastdist as fd
import torch
from torch import nn
from torch.nn import functional as F

IS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if IS_GPU else "cpu"


def batch(turn: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return 64 images of this replica, and their labels."""
    numbers = torch.Generator().manual_seed(10 * turn + fd.init().rank)
    x = torch.randn(64, 128, generator=numbers)
    return x.to(DEVICE), (x.sum(1) > 0).long().to(DEVICE)


class Training:
    """A model, its optimizer, and a step."""

    def __init__(self, strategy: fd.Strategy, compiled: bool = False, autocast: Any = None) -> None:
        self.strategy = strategy
        torch.manual_seed(0)
        with strategy.scope():
            self.model = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 2))
            self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-2)
        self._called: Any = (
            torch.compile(self.model, backend="aot_eager") if compiled else self.model
        )
        self._autocast = autocast
        self._scaler = torch.amp.GradScaler(DEVICE, enabled=autocast == torch.float16)

    def _step(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.optimizer.zero_grad()
        with torch.autocast(DEVICE, self._autocast, enabled=self._autocast is not None):
            loss = F.cross_entropy(self._called(x), y)
        self._scaler.scale(loss).backward()
        self._scaler.step(self.optimizer)
        self._scaler.update()
        return loss.detach()

    def run(self, turns: range) -> float:
        loss = torch.zeros(())
        for turn in turns:
            loss = self.strategy.reduce("mean", self.strategy.run(self._step, args=batch(turn)))
        return float(loss)

    def checkpoint(self) -> fd.Checkpoint:
        return fd.Checkpoint(model=self.model, optimizer=self.optimizer)

    def values(self) -> torch.Tensor:
        return torch.cat([p.detach().flatten().cpu() for p in self.model.parameters()])


def trains(strategy: fd.Strategy) -> None:
    assert Training(strategy).run(range(60)) < 0.3


def checkpoints_while_training(strategy: fd.Strategy) -> None:
    """Checkpoints saved during steps are right; training resumed from one gives the same bits."""
    manager = fd.CheckpointManager(fd.init().broadcast_object(tempfile.mkdtemp()))
    training = Training(strategy)
    training.run(range(5))
    saved = training.values()
    manager.save(training.checkpoint(), 5, async_op=True)
    training.run(range(5, 30))
    manager.wait()
    undisturbed = training.values()
    again = Training(strategy)
    manager.restore(again.checkpoint())
    assert torch.equal(again.values(), saved), "restored other values than were saved"
    again.run(range(5, 30))
    assert torch.equal(again.values(), undisturbed), "went on to other values"


def mixed_precision(strategy: fd.Strategy) -> None:
    kinds = (torch.bfloat16, torch.float16) if IS_GPU else (torch.bfloat16,)
    for kind in kinds:
        training = Training(strategy, autocast=kind)
        assert training.run(range(80)) < 0.35
        strategy.check_in_sync()


def compiled(strategy: fd.Strategy) -> None:
    plain, other = Training(strategy), Training(strategy, compiled=True)
    plain.run(range(10))
    other.run(range(10))
    assert torch.allclose(plain.values(), other.values(), rtol=1e-2, atol=1e-3)


def groups_of_collectives(strategy: fd.Strategy) -> None:
    """Groups of calls launched together from C++, including a ring of sends and receives."""
    comm = fd.init()
    n, r = comm.world_size, comm.rank
    for turn in range(20):
        a, b = (
            torch.full((size,), r + turn, device=DEVICE, dtype=torch.float32)
            for size in (7, 70_000)
        )
        host = torch.full((5,), 1.0)
        out = torch.empty(7 * n, device=DEVICE)
        got = torch.empty(70_000, device=DEVICE)
        with comm.group():
            comm.all_gather(a.clone(), out=out)
            comm.all_reduce(host)
            if n > 1:
                comm.send(b, (r + 1) % n)
                comm.recv(got, (r - 1) % n)
        assert torch.equal(out.cpu(), torch.arange(n).repeat_interleave(7).float() + turn)
        assert torch.equal(host, torch.full((5,), float(n)))
        assert n == 1 or bool((got == (r - 1) % n + turn).all())


PARTS: dict[str, Callable[[fd.Strategy], None]] = {
    part.__name__: part
    for part in (
        trains,
        checkpoints_while_training,
        mixed_precision,
        compiled,
        groups_of_collectives,
    )
}


def main() -> None:
    """Every replica runs this."""
    strategy = fd.MirroredStrategy()
    for name in sys.argv[1:] or PARTS:
        start = monotonic()
        PARTS[name](strategy)
        if os.environ.get("RANK", "0") == "0":
            seconds = round(monotonic() - start, 2)
            print(json.dumps({"part": name, "passed": True, "s": seconds}), flush=True)


if __name__ == "__main__":
    main()
