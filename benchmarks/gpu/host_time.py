"""The host's time of a call on GPU arrays, beside torch's NCCL: a line of JSON for each part.

    fastdist run --no-prefix -n N benchmarks/gpu/host_time.py       N = 1, or 2 that share a GPU

Medians of single calls in microseconds. Calls come in batches of 32, and the program waits for the
device between batches, so that no launch waits for room in its queue. With one rank NCCL launches
no kernel. Two ranks that share a GPU take turns, so the work is slow, but this does not affect the
host's time. On virtual GPUs the program only shows that it works, without a peer.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import fastdist as fd

TESTS = Path(__file__).parents[2] / "tests"
sys.path[:0] = [str(TESTS / "collectives" / "support"), str(TESTS / "virtual_gpu")]

from gpu_arrays import GpuArrays, choose  # noqa: E402

BATCH = 32
SMALL, MIDDLE = 256, 1 << 18  # elements of float32


def median_us(call: Callable[[], object], arrays: GpuArrays, calls: int) -> float:
    for _ in range(BATCH):
        call()
    arrays.synchronize()
    times: list[int] = []
    while len(times) < calls:
        for _ in range(BATCH):
            start = perf_counter_ns()
            call()
            times.append(perf_counter_ns() - start)
        arrays.synchronize()
    return round(statistics.median(times) / 1e3, 2)


def of_fastdist(comm: Any, arrays: GpuArrays) -> dict[str, Callable[[], object]]:
    small, middle = arrays.full(SMALL, 1), arrays.full(MIDDLE, 1)
    other = arrays.full(SMALL, 1)
    some = [arrays.full(SMALL, 1) for _ in range(20)]

    def group() -> None:
        with comm.group():
            for array in (small, middle, other):
                comm.all_reduce(array, "max")

    return {
        "all_reduce of 1 KiB": lambda: comm.all_reduce(small, "max"),
        "all_reduce of 1 MiB": lambda: comm.all_reduce(middle, "max"),
        "asynchronous": lambda: comm.all_reduce(small, "max", async_op=True),
        "asynchronous, and wait": lambda: comm.all_reduce(small, "max", async_op=True).wait(),
        "group of three": group,
        "list of 20": lambda: comm.all_reduce(some, "max"),
    }


def of_torch(arrays: GpuArrays, backend: str, dist: Any) -> dict[str, Callable[[], object]]:
    group = dist.new_group(backend=backend)
    small, middle = arrays.full(SMALL, 1), arrays.full(MIDDLE, 1)
    most = dist.ReduceOp.MAX

    def asynchronous(**options: Any) -> Any:
        return dist.all_reduce(small, most, group, async_op=True)

    return {
        "all_reduce of 1 KiB": lambda: dist.all_reduce(small, most, group),
        "all_reduce of 1 MiB": lambda: dist.all_reduce(middle, most, group),
        "asynchronous": asynchronous,
        "asynchronous, and wait": lambda: asynchronous().wait(),
        "asynchronous, and its future": lambda: asynchronous().get_future(),
    }


def main() -> None:
    """Every rank runs this."""
    comm, arrays = fd.init(timeout=60), choose()
    arrays.set_device(comm.rank % arrays.device_count())
    calls = 200 if arrays.are_virtual else 1600 if comm.world_size == 1 else 96
    measured = {"fastdist": of_fastdist(comm, arrays)}
    own_stream = nullcontext() if arrays.are_virtual else arrays.use_stream(arrays.new_stream())
    if not arrays.are_virtual:
        import torch.distributed as dist

        folder = comm.broadcast_object(tempfile.mkdtemp() if comm.rank == 0 else "")
        place = {"rank": comm.rank, "world_size": comm.world_size}
        comm.all_reduce(arrays.full(8, 1))  # ranks that share a GPU say so to NCCL
        dist.init_process_group("nccl", init_method=f"file://{folder}/store", **place)
        measured["torch's NCCL"] = of_torch(arrays, "nccl", dist)
        measured["torch, backend fastdist"] = of_torch(arrays, "fastdist", dist)
    with own_stream:
        for engine, cases in measured.items():
            for name, call in cases.items():
                us = median_us(call, arrays, calls)
                if comm.rank == 0:
                    row = {"ranks": comm.world_size, "engine": engine, "call": name, "host_us": us}
                    print(json.dumps(row), flush=True)
    comm.barrier()
    os._exit(0)  # without the shutdown of NCCL and torch


if __name__ == "__main__":
    main()
