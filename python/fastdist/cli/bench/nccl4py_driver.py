"""Drives NVIDIA's nccl4py, with torch or cupy arrays as fastdist is called."""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from fastdist.cli.bench.arrays import Array, ArrayLibrary, UnsupportedCaseError
from fastdist.cli.bench.buckets import Buckets
from fastdist.cli.bench.cases import Case
from fastdist.cli.bench.collectives import ROOT
from fastdist.cli.bench.driver import BUCKET_BYTES, Call, Driver
from fastdist.cli.bench.gpu import meet, nccl_version_text, open_gpu, prepare_for_sharing


class Nccl4pyDriver:
    """Calls go to a communicator over all ranks, on the array library's stream."""

    def __init__(self, folder: Path, library: str) -> None:
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self._nccl: Any = importlib.import_module("nccl.core")
        versions = self._nccl.get_version()
        if versions.libnccl is None:
            raise RuntimeError(
                f"nccl4py {versions.nccl4py} finds no NCCL: pip install nvidia-nccl-cu13, or "
                "nvidia-nccl-cu12 for CUDA 12"
            )
        release = versions.libnccl.version
        nccl_version = 10000 * release.major + 100 * release.minor + release.micro
        prepare_for_sharing(nccl_version, world_size)
        self.gpu = open_gpu(rank, library)
        identity = meet(folder, "nccl4py.id", rank, lambda: self._nccl.get_unique_id().as_bytes)
        self._comm: Any = self._nccl.Communicator.init(
            world_size, rank, self._nccl.UniqueId.from_bytes(identity)
        )
        self.rank: int = rank
        self.world_size: int = world_size
        self.version = f"nccl4py {versions.nccl4py} with NCCL {nccl_version_text(nccl_version)}"
        self._flag = self.gpu.arrays.make((1,), "int32")

    def arrays(self, kind: str) -> ArrayLibrary:
        """See `Driver`."""
        return self.gpu.arrays

    def barrier_call(self) -> Call:
        """See `Driver`."""
        reduce = self._comm.allreduce
        return partial(reduce, self._flag, self._flag, self._nccl.SUM, stream=self.gpu.stream)

    def _redop(self, case: Case) -> Any:
        return (
            self._nccl.AVG
            if case.redop == "mean"
            else getattr(self._nccl, case.redop.upper() or "SUM")
        )

    def bind(self, case: Case, passes: Array | None, gets: Array | None) -> Call:
        """See `Driver`."""
        if case.collective == "send_recv":
            return self._ring(passes, gets)
        redop = self._redop(case)
        calls: dict[str, tuple[str, tuple[Any, ...]]] = {
            "all_reduce": ("allreduce", (passes, passes, redop)),
            "reduce": ("reduce", (passes, passes, redop, ROOT)),
            "broadcast": ("broadcast", (passes, passes, ROOT)),
            "all_gather": ("allgather", (passes, gets)),
            "gather": ("gather", (passes, gets, ROOT)),
            "scatter": ("scatter", (passes, gets, ROOT)),
            "reduce_scatter": ("reduce_scatter", (passes, gets, redop)),
            "all_to_all": ("alltoall", (passes, gets)),
        }
        if case.collective not in calls:
            raise UnsupportedCaseError(f"nccl4py has no {case.collective}")
        name, arguments = calls[case.collective]
        return partial(getattr(self._comm, name), *arguments, stream=self.gpu.stream)

    def _ring(self, passes: Array | None, gets: Array | None) -> Call:
        comm, group, stream = self._comm, self._nccl.group, self.gpu.stream
        to, source = (self.rank + 1) % self.world_size, (self.rank - 1) % self.world_size

        def ring() -> None:
            with group():
                comm.send(passes, to, stream=stream)
                comm.recv(gets, source, stream=stream)

        return ring

    def bind_list(self, case: Case, variant: str, arrays: Sequence[Array]) -> Call:
        """See `Driver`."""
        all_reduce, stream = self._comm.allreduce, self.gpu.stream
        group, redop, library = self._nccl.group, self._redop(case), self.gpu.arrays
        if variant == "one group":

            def grouped() -> None:
                with group():
                    for array in arrays:
                        all_reduce(array, array, redop, stream=stream)

            return grouped
        if variant != "25 MB buckets":
            raise UnsupportedCaseError(f"nccl4py has no {variant!r}")
        buckets = Buckets(library, arrays, case.dtype, BUCKET_BYTES)

        def bucketed() -> None:
            for bucket in buckets:
                library.copy_all(bucket.parts, bucket.arrays)
                all_reduce(bucket.flat, bucket.flat, redop, stream=stream)
                library.copy_all(bucket.arrays, bucket.parts)

        return bucketed

    def close(self) -> None:
        """See `Driver`."""
        self.gpu.synchronize()
        self._comm.destroy()


def open_driver(folder: Path, array: str) -> Driver:
    """Joins the other ranks. Every rank must call."""
    return Nccl4pyDriver(folder, "cupy" if array == "cupy" else "torch")
