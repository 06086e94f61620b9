"""Drives fastdist itself on GPUs."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import fastdist
from fastdist.cli.bench.arrays import Array, ArrayLibrary, torch_arrays
from fastdist.cli.bench.driver import Call
from fastdist.cli.bench.fastdist_driver import FastdistCalls
from fastdist.cli.bench.gpu import Gpu, gpu_of_rank
from fastdist.cluster.launch import detect_launch
from fastdist.collectives.engines import nccl_library


class FastdistCudaDriver(FastdistCalls):
    """Calls go to the default communicator, in the order of torch's stream."""

    def __init__(self, folder: Path) -> None:
        launch = detect_launch()
        self.gpu = Gpu(gpu_of_rank(0 if launch is None else launch.local_rank))
        super().__init__(fastdist.init())
        nccl = nccl_library.load().version_text
        self.version = f"fastdist {fastdist.__version__} with NCCL {nccl}"
        self._flag = self.gpu.arrays.make((1,), "int32")

    def arrays(self, kind: str) -> ArrayLibrary:
        if kind == "empty":
            return torch_arrays(make=self._registered)
        return self.gpu.arrays

    def _registered(self, shape: Sequence[int], dtype: str) -> Array:
        """Return a tensor from `comm.empty`. Every rank must call."""
        torch: Any = importlib.import_module("torch")
        device = f"cuda:{self.gpu.device}"
        return self._comm.empty(tuple(shape), dtype=getattr(torch, dtype), device=device)

    def barrier_call(self) -> Call:
        return partial(self._comm.all_reduce, self._flag)

    def close(self) -> None:
        self.gpu.synchronize()
        self._comm.close()
