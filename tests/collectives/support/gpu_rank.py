"""One rank of a job on GPUs, or all ranks as threads, by the compiled interface.

    gpu_rank.py PART...              this process is a rank of a job of `fastdist run`
    gpu_rank.py PART... --threads N  N ranks are threads of this process

Ranks share GPUs if there are fewer GPUs than ranks.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import sys
import traceback
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

import fastdist
import fastdist._core as _core
import gpu_collectives
import gpu_lifetimes
import ml_dtypes
from fastdist.collectives.engines import nccl_library
from gpu_arrays import GpuArrays, choose
from reference import sample

TIMEOUT_S = 60.0


class Rank:
    """A rank, with a communicator between hosts and one between GPUs."""

    def __init__(self, host: Any, arrays: GpuArrays, unique_id: bytes) -> None:
        self.host, self.arrays = host, arrays
        self.nccl = nccl_library.load()
        self.rank, self.size = host.rank, host.world_size
        self.device = self.rank % arrays.device_count()
        arrays.set_device(self.device)
        self.gpu = self.connect(unique_id, self.checker())

    def checker(self) -> Any:
        """Make a communicator of all hosts, to compare calls of a communicator between GPUs."""
        hosts = self.host.subgroup(range(self.size))
        assert hosts is not None
        return hosts

    def connect(self, unique_id: bytes, checker: Any = None) -> Any:
        host = None if checker is None else checker.engine.compiled
        return _core.NcclCommunicator.connect(
            unique_id, self.rank, self.size, self.device, host, TIMEOUT_S
        )

    def new_id(self) -> bytes:
        """Make an NCCL id, equal on all ranks."""
        made: bytes = self.host.broadcast_object(_core.new_nccl_id() if self.rank == 0 else b"")
        return made

    def call(self, name: str, *array: Any, async_op: bool = False, **given: Any) -> Any:
        """Call on the current stream; by `gpu`, if one is given, and to sum, if no op is."""
        gpu, stream = given.pop("gpu", self.gpu), self.arrays.current_stream()
        calls = gpu.calls(given.pop("timeout_s", TIMEOUT_S))
        return calls[name](*array, **{"op": "sum"} | given, stream=stream, async_op=async_op)

    def call_async(self, name: str, *array: Any, **given: Any) -> Any:
        """Call on the communicator's own stream, after the work of the current stream."""
        return self.call(name, *array, async_op=True, **given)

    def inputs(self, dtype: str, size: int) -> list[Any]:
        """Return the input of each rank."""
        return [sample(dtype, size, 3, rank) for rank in range(self.size)]


ALL = (*gpu_collectives.PARTS, *gpu_lifetimes.PARTS, *gpu_lifetimes.VIRTUAL_PARTS)
PARTS = {part.__name__: part for part in ALL}


def run(host: Any, arrays: GpuArrays, unique_id: bytes, parts: list[str]) -> None:
    rank = Rank(host, arrays, unique_id)
    for part in parts:
        if rank.rank == 0:
            print(part, flush=True)
        PARTS[part](rank)
        arrays.synchronize()
    rank.gpu.close()


def allow_sharing(arrays: GpuArrays, ranks: int) -> None:
    library = nccl_library.load()
    if ranks > arrays.device_count():
        nccl_library.allow_sharing(library.version)


def main(parts: list[str], threads: int | None) -> None:
    arrays = choose()
    if threads is None:
        host = fastdist.init()
        allow_sharing(arrays, host.world_size)
        unique_id = host.broadcast_object(_core.new_nccl_id() if host.rank == 0 else b"")
        return run(host, arrays, unique_id, parts)
    allow_sharing(arrays, threads)
    unique_id = _core.new_nccl_id()
    with ThreadPoolExecutor(threads) as pool:
        ranks = [
            pool.submit(run, host, arrays, unique_id, parts)
            for host in fastdist.local_group(threads)
        ]
        for ended in as_completed(ranks):
            if ended.exception() is not None:
                traceback.print_exception(ended.exception())
                sys.stderr.flush()
                os._exit(1)  # the other ranks wait for it


if __name__ == "__main__":
    assert ml_dtypes is not None  # registers small floats with numpy
    faulthandler.dump_traceback_later(160, exit=True)  # a hanging rank reports its stack
    words = argparse.ArgumentParser()
    words.add_argument("parts", nargs="+", choices=PARTS)
    words.add_argument("--threads", type=int)
    given = words.parse_args()
    main(given.parts, given.threads)
