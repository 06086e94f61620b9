"""Drives fastdist itself."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import fastdist
from fastdist.cli.bench.cases import ROOT, Case
from fastdist.cli.bench.driver import (
    Array,
    ArrayLibrary,
    Call,
    Driver,
    UnsupportedCaseError,
    numpy_arrays,
    torch_arrays,
)
from fastdist.cli.bench.gpu import Gpu, gpu_of_rank
from fastdist.cluster.launch import detect_launch
from fastdist.collectives.engines import nccl_library


class FastdistDriver(Driver):
    """Calls go to the default communicator; on a GPU, in the order of torch's stream."""

    def __init__(self, gpu: Any = None) -> None:
        self.gpu = gpu
        self._comm = comm = fastdist.init()
        self.rank = comm.rank
        self.world_size = comm.world_size
        self.version = f"fastdist {fastdist.__version__}"
        self.barrier: Call = comm.barrier
        if gpu is not None:
            self.barrier = partial(comm.all_reduce, gpu.arrays.make((1,), "int32"))

    def arrays(self, kind: str) -> ArrayLibrary:
        if self.gpu is not None:
            library: ArrayLibrary = self.gpu.arrays
        else:
            library = torch_arrays() if kind == "torch" else numpy_arrays()
        return replace(library, make=self._empty) if kind == "empty" else library

    def _empty(self, shape: Sequence[int], dtype: str) -> Array:
        if self.gpu is None:
            return self._comm.empty(tuple(shape), dtype)
        torch_dtype = getattr(importlib.import_module("torch"), dtype)
        return self._comm.empty(tuple(shape), torch_dtype, f"cuda:{self.gpu.device}")

    def bind(self, case: Case, passes: Array | None, gets: Array | None) -> Call:
        comm = self._comm
        # The default reduce op is omitted, as users do.
        redop = () if case.redop in ("", "sum") else (case.redop,)
        if case.collective == "barrier":
            return comm.barrier
        if case.collective == "send_recv":
            return self.ring_call(comm.send, comm.recv, passes, gets)
        call = getattr(comm, case.collective)
        if case.collective in ("gather", "scatter"):
            return partial(call, passes, ROOT, out=gets)
        if gets is None:
            return partial(call, passes, *redop)
        return partial(call, passes, *redop, out=gets)

    def bind_list(self, case: Case, variant: str, arrays: Sequence[Array]) -> Call:
        if variant == "list in bf16":
            if case.dtype not in ("float32", "float64"):
                raise UnsupportedCaseError(f"{case.dtype} is not compressed")
            return partial(self._comm.all_reduce, list(arrays), case.redop, compress="bf16")
        argument = arrays[0] if variant == "one array" else list(arrays)
        return partial(self._comm.all_reduce, argument, case.redop)

    def close(self) -> None:
        if self.gpu is not None:
            self.gpu.synchronize()
        self._comm.close()


def open_cuda() -> FastdistDriver:
    """Start fastdist on this rank's GPU."""
    launch = detect_launch()
    driver = FastdistDriver(Gpu(gpu_of_rank(0 if launch is None else launch.local_rank)))
    driver.version += f" with NCCL {nccl_library.load().version_text}"
    return driver
