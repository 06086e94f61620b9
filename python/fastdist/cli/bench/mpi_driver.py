"""Drives an MPI through mpi4py, always with numpy arrays.

For torch tensors, users of mpi4py would pass `tensor.numpy()`, made once.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from fastdist.cli.bench.arrays import Array, ArrayLibrary, UnsupportedCaseError, numpy_arrays
from fastdist.cli.bench.cases import Case
from fastdist.cli.bench.collectives import COLLECTIVES, ROOT
from fastdist.cli.bench.driver import Call, Driver, bucketed


def _copy_all(to: Sequence[Array], source: Sequence[Array]) -> None:
    for target, array in zip(to, source, strict=True):
        target[...] = array


class MpiDriver(Driver):
    """Calls go to COMM_WORLD."""

    def __init__(self) -> None:
        self._mpi: Any = importlib.import_module("mpi4py.MPI")
        self._comm: Any = self._mpi.COMM_WORLD
        self.rank: int = self._comm.rank
        self.world_size: int = self._comm.size
        self.barrier = self._comm.Barrier
        vendor, numbers = self._mpi.get_vendor()
        self.version = f"{vendor} {'.'.join(map(str, numbers))}"

    def arrays(self, kind: str) -> ArrayLibrary:
        return numpy_arrays()

    def _redop(self, case: Case) -> Any:
        if COLLECTIVES[case.collective].reduces and case.dtype == "float16":
            raise UnsupportedCaseError("MPI has no 16-bit floating point numbers")
        if case.redop == "mean":
            raise UnsupportedCaseError("MPI has no mean")
        return getattr(self._mpi, case.redop.upper() or "SUM")

    def bind(self, case: Case, passes: Array | None, gets: Array | None) -> Call:
        comm, in_place = self._comm, self._mpi.IN_PLACE
        redop = self._redop(case)
        if case.dtype == "float16":
            passes, gets = (None if a is None else a.view(np.uint16) for a in (passes, gets))
        if case.collective == "send_recv":
            return self.ring_call(comm.Send, comm.Recv, passes, gets)
        reduced = (in_place, passes) if self.rank == ROOT else (passes, None)
        calls: dict[str, tuple[str, tuple[Any, ...]]] = {
            "all_reduce": ("Allreduce", (in_place, passes, redop)),
            "reduce": ("Reduce", (*reduced, redop, ROOT)),
            "broadcast": ("Bcast", (passes, ROOT)),
            "all_gather": ("Allgather", (passes, gets)),
            "gather": ("Gather", (passes, gets, ROOT)),
            "scatter": ("Scatter", (passes, gets, ROOT)),
            "reduce_scatter": ("Reduce_scatter_block", (passes, gets, redop)),
            "all_to_all": ("Alltoall", (passes, gets)),
            "barrier": ("Barrier", ()),
        }
        name, arguments = calls[case.collective]
        return partial(getattr(comm, name), *arguments)

    def bind_list(self, case: Case, variant: str, arrays: Sequence[Array]) -> Call:
        all_reduce, in_place, redop = self._comm.Allreduce, self._mpi.IN_PLACE, self._redop(case)

        def reduce(flat: Array) -> None:
            all_reduce(in_place, flat, redop)

        return bucketed(numpy_arrays(), _copy_all, arrays, case.dtype, reduce)

    def close(self) -> None:
        self._mpi.Finalize()
