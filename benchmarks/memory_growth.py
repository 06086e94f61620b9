"""Measures memory beyond the caller's arrays, and its growth over many calls.

    fastdist run --no-prefix -n 2 benchmarks/memory_growth.py

Each rank prints `{"staging_bytes": ..., "growth_bytes": ...}`: private memory and this rank's share
of the memory shared with other ranks (Pss), from the kernel's `smaps_rollup`.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import fastdist
import numpy as np

_CALLS = 100_000
_LARGE_ELEMENTS = 16 << 20
_SIZES = (2, 256, 4096)


def _memory_bytes() -> int:
    kilobytes = 0
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        name, _, value = line.partition(":")
        if name in ("Pss_Anon", "Pss_Shmem"):
            kilobytes += int(value.split()[0])
    return 1024 * kilobytes


def _calls(comm: Any, arrays: list[np.ndarray[Any, Any]], number: int) -> None:
    """Calls all_reduce and broadcast on several sizes, on a list, and asynchronously."""
    for index in range(number // 4):
        array = arrays[index % len(arrays)]
        array.fill(1)
        comm.all_reduce(array)
        comm.broadcast(array)
        comm.all_reduce(arrays, op="max")
        comm.all_reduce(array, op="max", async_op=True).wait()


def main() -> None:
    """Runs on every rank."""
    world_size = int(os.environ["WORLD_SIZE"])
    large = np.ones(_LARGE_ELEMENTS, np.float32)
    gathered = np.ones(world_size * _LARGE_ELEMENTS // 4, np.float32)
    arrays = [np.ones(size, np.float32) for size in _SIZES]
    before = _memory_bytes()
    comm = fastdist.init()
    for _ in range(3):
        comm.all_reduce(large)
        comm.all_reduce([large[: 1 << 20], large[1 << 20 :]], op="max")
        comm.all_gather(large[: _LARGE_ELEMENTS // 4], out=gathered)
    _calls(comm, arrays, 1000)
    comm.barrier()
    staging = _memory_bytes() - before
    comm.barrier()
    _calls(comm, arrays, _CALLS)
    comm.barrier()
    growth = _memory_bytes() - before - staging
    print(json.dumps({"staging_bytes": staging, "growth_bytes": growth}), flush=True)
    comm.barrier()
    comm.close()


if __name__ == "__main__":
    main()
