"""Drives MLX's ring over TCP, with MLX's arrays.

MLX's arrays never change: a result is a new array, which takes the place of the old one.
"""

from __future__ import annotations

import importlib
import json
import math
import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

import fastdist
from fastdist.cli.bench.arrays import Array, ArrayLibrary, UnsupportedCaseError
from fastdist.cli.bench.cases import Case
from fastdist.cli.bench.driver import Call, Driver
from fastdist.cluster.address import reserve_port

_HOST = "127.0.0.1"


class _Place:
    """Holds an array of one dimension, whose place another array may take."""

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
        hosts = [[f"{_HOST}:{port}"] for port in ports]
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
