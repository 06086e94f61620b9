"""Drives fastdist itself."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from functools import partial
from typing import Any

import fastdist
from fastdist.cli.bench.arrays import (
    Array,
    ArrayLibrary,
    UnsupportedCaseError,
    numpy_arrays,
    torch_arrays,
)
from fastdist.cli.bench.cases import Case
from fastdist.cli.bench.collectives import ROOT
from fastdist.cli.bench.driver import Call, Driver
from fastdist.cli.bench.gpu import Gpu, gpu_of_rank
from fastdist.cluster.launch import detect_launch
from fastdist.collectives.engines import nccl_library


class FastdistCalls(Driver):
    """Binds arrays on any device to calls of a communicator; the base of fastdist's drivers."""

    def __init__(self, comm: fastdist.Communicator) -> None:
        self._comm = comm
        self.rank = comm.rank
        self.world_size = comm.world_size
        self.barrier = comm.barrier

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


class FastdistDriver(FastdistCalls):
    """Calls go to the default communicator over all ranks."""

    def __init__(self) -> None:
        super().__init__(fastdist.init())
        self.version = f"fastdist {fastdist.__version__}"

    def arrays(self, kind: str) -> ArrayLibrary:
        if kind == "torch":
            return torch_arrays()
        if kind == "empty":
            return numpy_arrays(lambda shape, dtype: self._comm.empty(tuple(shape), dtype=dtype))
        return numpy_arrays()

    def close(self) -> None:
        self._comm.close()


class FastdistCudaDriver(FastdistCalls):
    """Calls go to the default communicator, in the order of torch's stream."""

    def __init__(self) -> None:
        launch = detect_launch()
        self.gpu = self._gpu = Gpu(gpu_of_rank(0 if launch is None else launch.local_rank))
        super().__init__(fastdist.init())
        nccl = nccl_library.load().version_text
        self.version = f"fastdist {fastdist.__version__} with NCCL {nccl}"
        self.barrier = partial(self._comm.all_reduce, self._gpu.arrays.make((1,), "int32"))

    def arrays(self, kind: str) -> ArrayLibrary:
        if kind != "empty":
            return self._gpu.arrays
        torch: Any = importlib.import_module("torch")
        device = f"cuda:{self._gpu.device}"
        return torch_arrays(
            make=lambda shape, dtype: self._comm.empty(
                tuple(shape), dtype=getattr(torch, dtype), device=device
            )
        )

    def close(self) -> None:
        self._gpu.synchronize()
        self._comm.close()
