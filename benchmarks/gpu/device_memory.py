"""Device memory that fastdist takes beyond the caller's arrays, and whether calls add to it.

    fastdist run --no-prefix -n N benchmarks/gpu/device_memory.py

Each rank prints `{"calls": ..., "buckets_bytes": ..., "again_bytes": ..., "growth_bytes": ...}`:
the memory of the first calls of every kind, including NCCL's own buffers; the memory that the same
lists add when repeated; and the growth over many calls: 10,000, or 1,000 if ranks share the GPU,
because they take turns. Figures are differences of the whole GPU's used memory, read while all
ranks are idle: ranks that share a GPU print the same, and no other program may use it meanwhile.
Virtual GPUs count the memory allocated by the rank's process.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fastdist as fd
from fastdist.cli.bench.cases import GRADIENT_SHAPES

TESTS = Path(__file__).parents[2] / "tests"
sys.path[:0] = [str(TESTS / "collectives" / "support"), str(TESTS / "virtual_gpu")]

from gpu_arrays import GpuArrays, choose  # noqa: E402

SIZES = (2, 1 << 10, 1 << 18)


def used_bytes(comm: Any, arrays: GpuArrays, device: int) -> int:
    """Return the used memory of the GPU after the work of all ranks. Every rank must call."""
    arrays.synchronize()
    comm.all_gather_object(None)  # the hosts meet
    used = arrays.bytes_in_use(device)
    comm.all_gather_object(None)  # nobody goes on before all have read
    return used


def kinds(comm: Any, alone: list[Any], grads: list[Any]) -> list[Callable[[], object]]:
    """Return calls of every kind: alone, as lists through buckets, compressed, asynchronous."""
    small = grads[:20]
    return [
        *[lambda x=x: comm.all_reduce(x, op="max") for x in alone],
        lambda: comm.broadcast(alone[1]),
        lambda: comm.all_reduce(alone[1], op="max", async_op=True).wait(),
        lambda: comm.all_reduce(small, op="mean"),
        lambda: comm.all_reduce(small, op="mean", compress="bf16"),
        lambda: comm.broadcast(small),
    ]


def main() -> None:
    """Every rank runs this."""
    comm, arrays = fd.init(), choose()
    device = comm.rank % arrays.device_count()
    arrays.set_device(device)
    many = 100 if arrays.are_virtual else 10_000 if comm.world_size == 1 else 1_000
    warm_up = many // 10
    sizes = [math.prod(shape) for shape in GRADIENT_SHAPES["resnet50"]]
    alone = [arrays.full(size, 1) for size in SIZES]
    grads = [arrays.full(size, 1) for size in sizes]
    calls = kinds(comm, alone, grads)
    before = used_bytes(comm, arrays, device)
    comm.all_reduce(grads, op="mean")
    for call in calls:
        call()
    first = used_bytes(comm, arrays, device)
    for _ in range(3):
        comm.all_reduce(grads, op="mean")
    again = used_bytes(comm, arrays, device)
    for index in range(warm_up):
        calls[index % len(calls)]()
    warm = used_bytes(comm, arrays, device)
    for index in range(many):
        calls[index % len(calls)]()
    figures = {
        "calls": many,
        "buckets_bytes": first - before,
        "again_bytes": again - first,
        "growth_bytes": used_bytes(comm, arrays, device) - warm,
    }
    print(json.dumps(figures), flush=True)
    comm.close()


if __name__ == "__main__":
    main()
