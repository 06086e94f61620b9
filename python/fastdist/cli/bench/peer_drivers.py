"""Drives an MPI through mpi4py, with numpy arrays, and MLX's ring over TCP, with MLX's arrays."""

from __future__ import annotations

import importlib
import json
import math
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

import fastdist
from fastdist.cli.bench.cases import COLLECTIVES, ROOT, Case
from fastdist.cli.bench.driver import (
    Array,
    ArrayLibrary,
    Call,
    Driver,
    UnsupportedCaseError,
    bucketed,
    numpy_arrays,
)
from fastdist.cluster.address import reserve_port


def _copy_all(to: Sequence[Array], source: Sequence[Array]) -> None:
    for target, array in zip(to, source, strict=True):
        target[...] = array


class MpiDriver(Driver):
    """Calls go to COMM_WORLD.

    For torch tensors, users of mpi4py would pass `tensor.numpy()`, made once.
    """

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


class _Place:
    """Holds a flat array. MLX's arrays never change: a result takes the place of the old one."""

    def __init__(self, value: Any, shape: tuple[int, ...]) -> None:
        self.value = value
        self.shape = shape

    def __len__(self) -> int:
        return int(self.value.size)


class MlxDriver(Driver):
    """Calls go to MLX's global group; a call ends when its result has been computed."""

    def __init__(self) -> None:
        comm = fastdist.init()
        with reserve_port()[0] as holder:
            ports = comm.all_gather_object(holder.getsockname()[1])
        hosts = [[f"127.0.0.1:{port}"] for port in ports]
        file = os.memfd_create("hosts")
        os.write(file, json.dumps(hosts).encode())
        os.environ |= {"MLX_HOSTFILE": f"/proc/self/fd/{file}", "MLX_RANK": str(comm.rank)}
        comm.close()
        self._mx: Any = importlib.import_module("mlx.core")
        self._mx.set_default_device(self._mx.cpu)
        self._group: Any = self._mx.distributed.init(strict=True, backend="ring")
        self.rank: int = self._group.rank()
        self.world_size: int = self._group.size()
        one = self._mx.ones((1,))
        self.barrier = lambda: self._mx.eval(self._mx.distributed.all_sum(one))
        self.version = f"MLX {self._mx.__version__}, its ring"

    def arrays(self, kind: str) -> ArrayLibrary:
        mx = self._mx

        def make(shape: Sequence[int], dtype: str) -> Array:
            return _Place(mx.zeros((math.prod(shape),), getattr(mx, dtype)), tuple(shape))

        def filler(place: _Place) -> Callable[[float], object]:
            def fill(value: float) -> None:
                place.value = mx.full(place.value.shape, value, place.value.dtype)
                mx.eval(place.value)

            return fill

        def write(place: _Place, start: int, block: npt.NDArray[Any]) -> None:
            place.value[start : start + block.size] = mx.array(block).astype(place.value.dtype)
            mx.eval(place.value)

        def read(place: _Place, start: int, stop: int) -> npt.NDArray[Any]:
            part = place.value[start:stop]
            return np.array(part.astype(mx.float32) if part.dtype == mx.bfloat16 else part)

        return ArrayLibrary(make, lambda place: place, filler, write, read)

    def bind(self, case: Case, passes: Array | None, gets: Array | None) -> Call:
        mx = self._mx
        if case.collective == "send_recv":
            return self.ring_call(self._send, self._recv, passes, gets)
        functions = {
            ("all_reduce", "sum"): mx.distributed.all_sum,
            ("all_reduce", "min"): mx.distributed.all_min,
            ("all_reduce", "max"): mx.distributed.all_max,
            ("all_gather", ""): mx.distributed.all_gather,
            ("reduce_scatter", "sum"): mx.distributed.sum_scatter,
        }
        function = functions.get((case.collective, case.redop))
        if function is None:
            raise UnsupportedCaseError(f"MLX has no {case.collective} {case.redop}".rstrip())
        given: Any = passes
        result: Any = passes if gets is None else gets

        def call() -> None:
            result.value = function(given.value)
            mx.eval(result.value)

        return call

    def _send(self, place: _Place, to: int) -> None:
        self._mx.eval(self._mx.distributed.send(place.value, to))

    def _recv(self, place: _Place, source: int) -> None:
        place.value = self._mx.distributed.recv_like(place.value, source)
        self._mx.eval(place.value)

    def bind_list(self, case: Case, variant: str, arrays: Sequence[Array]) -> Call:
        """Bind a list as `mlx.nn.average_gradients` does."""
        if case.redop != "sum":
            raise UnsupportedCaseError(f"MLX has no {case.redop} of a list")
        mx = self._mx
        ends = np.cumsum([len(place) for place in arrays]).tolist()

        def call() -> None:
            whole = mx.distributed.all_sum(mx.concatenate([place.value for place in arrays]))
            parts = mx.split(whole, ends[:-1])
            mx.eval(parts)
            for place, part in zip(arrays, parts, strict=True):
                place.value = part

        return call

    def close(self) -> None:
        """Do nothing: the group ends with the process."""
