"""Times saving and restoring a checkpoint of 400 MB, next to `dd` with fsync on the same disk.

    OMP_NUM_THREADS=1 fastdist run -n 2 benchmarks/checkpoints.py [--directory DIR]

Prints one JSON object. Times are medians in seconds of the slowest rank; the restored values are
checked. `async_call` is the time by which the call delays training; `async_steps` is the time added
to all following steps together, until the checkpoint is written.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import fastdist as fd
import numpy as np
import torch
from torch import nn

WIDTH, LAYERS = 2000, 25  # 100 M parameters of 4 bytes
ROUNDS = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--directory", default=tempfile.gettempdir(), help="on the disk to measure")
    options = parser.parse_args()
    strategy = fd.MirroredStrategy()
    comm = fd.default_communicator()
    with strategy.scope():
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    nbytes = sum(p.numel() * 4 for p in model.parameters())
    folder = tempfile.mkdtemp(dir=options.directory) if comm.rank == 0 else None
    directory = Path(comm.broadcast_object(folder))
    manager = fd.CheckpointManager(directory / "checkpoints", max_to_keep=2)
    checkpoint = fd.Checkpoint(model=model, step=0)
    x = torch.randn(32, WIDTH) * 0.01

    def step() -> None:
        """Training's load, and values that differ at each save."""
        with torch.no_grad():
            model(x)
            for parameter in model.parameters():
                parameter.add_(1e-3)

    def timed(call: Callable[[], object]) -> float:
        comm.barrier()
        start = time.perf_counter()
        call()
        took = np.array([time.perf_counter() - start])
        return float(comm.all_reduce(took, "max")[0])

    def steps(count: int) -> None:
        for _ in range(count):
            step()

    def save(async_op: bool = False) -> None:
        checkpoint.step += 1
        manager.save(checkpoint, async_op=async_op)

    times: dict[str, list[float]] = {}

    def note(name: str, seconds: float) -> None:
        times.setdefault(name, []).append(seconds)

    for _ in range(4):  # until the page cache has taken its memory
        save(async_op=True)
        manager.wait()
    for _ in range(ROUNDS):
        if comm.rank == 0:
            note("dd", dd(directory / "dd", nbytes))
        step()
        note("save", timed(save))
        note("restore", timed(lambda: manager.restore(checkpoint)))
        alone = timed(lambda: steps(20))
        note("async_call", timed(lambda: save(async_op=True)))
        note("async_steps", timed(lambda: steps(20)) - alone)
        note("async_wait", timed(manager.wait))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    save()
    step()
    manager.restore(checkpoint)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    manager.close()
    if comm.rank == 0:
        subprocess.run(["rm", "-r", str(directory)], check=True)
        medians = {name: round(statistics.median(values), 4) for name, values in times.items()}
        print(json.dumps({"bytes": nbytes, "replicas": comm.world_size, **medians}))


def dd(path: Path, nbytes: int) -> float:
    """Return the time that `dd` takes for a file of this size on the disk."""
    start = time.perf_counter()
    arguments = ["if=/dev/zero", f"of={path}", "bs=1M", f"count={nbytes >> 20}", "conv=fsync"]
    subprocess.run(["dd", *arguments], check=True, stderr=subprocess.DEVNULL)
    took = time.perf_counter() - start
    path.unlink()
    return took


if __name__ == "__main__":
    main()
