"""Device memory that fastdist takes beyond the caller's arrays, and whether calls add to it.

    fastdist run --no-prefix -n 2 benchmarks/gpu/device_memory.py

Each rank prints `{"buckets_bytes": ..., "again_bytes": ..., "growth_bytes": ...}`: what the first
calls of every kind take, NCCL's own buffers included; what the same lists take once more; what
10,000 calls add. It is the memory in use of the whole GPU, read while all ranks stand still: ranks
that share a GPU print the same, and nobody else may use it meanwhile.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

import fastdist
import torch
from fastdist.cli.bench.models import gradient_shapes

_CALLS = 10_000
_WARM_UP = 200
_SIZES = (2, 1 << 10, 1 << 18)


def used_bytes(comm: Any) -> int:
    """Returns the used memory of the GPU after the work of all ranks. Every rank must call."""
    torch.cuda.synchronize()
    comm.all_gather_object(None)  # the hosts meet
    free, total = torch.cuda.mem_get_info()
    comm.all_gather_object(None)  # nobody goes on before all have read
    return total - free


def kinds(
    comm: Any, arrays: list[torch.Tensor], grads: list[torch.Tensor]
) -> list[Callable[[], object]]:
    """Calls of every kind: alone, as lists through buckets, compressed, asynchronous."""
    small = grads[:20]
    alone = [lambda x=x: comm.all_reduce(x, op="max") for x in arrays]
    return [
        *alone,
        lambda: comm.broadcast(arrays[1]),
        lambda: comm.all_reduce(arrays[1], op="max", async_op=True).wait(),
        lambda: comm.all_reduce(small, op="mean"),
        lambda: comm.all_reduce(small, op="mean", compress="bf16"),
        lambda: comm.all_reduce(small, op="mean", compress="fp8"),
        lambda: comm.broadcast(small),
    ]


def main() -> None:
    """Every rank runs this."""
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank % torch.cuda.device_count())
    comm = fastdist.init()
    arrays = [torch.ones(size, device="cuda") for size in _SIZES]
    grads = [torch.ones(shape, device="cuda") for shape in gradient_shapes("resnet50")]
    calls = kinds(comm, arrays, grads)
    before = used_bytes(comm)
    comm.all_reduce(grads, op="mean")
    for call in calls:
        call()
    first = used_bytes(comm)
    for _ in range(3):
        comm.all_reduce(grads, op="mean")
    again = used_bytes(comm)
    for index in range(_WARM_UP):
        calls[index % len(calls)]()
    warm = used_bytes(comm)
    for index in range(_CALLS):
        calls[index % len(calls)]()
    figures = {
        "buckets_bytes": first - before,
        "again_bytes": again - first,
        "growth_bytes": used_bytes(comm) - warm,
    }
    print(json.dumps(figures), flush=True)
    comm.close()


if __name__ == "__main__":
    main()
