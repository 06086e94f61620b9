"""A rank of the bench on a virtual GPU, and that GPU as the bench drives it.

Started as the bench's own worker is. The engine, the kernels' plans and the bench are the real
ones; times mean nothing, since the runtime below keeps none.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from time import perf_counter_ns

import fastdist._core as _core
import virtual_arrays as va
from fastdist.cli.bench import drivers
from fastdist.cli.bench.drivers import ArrayLibrary
from fastdist.cli.bench.worker import main
from small_list import add_small_list

Call = Callable[[], object]


class Shaped(va.Array):
    """An array with a length and flat views."""

    def __len__(self) -> int:
        return int(self.shape[0])

    def reshape(self, size: int) -> Shaped:
        assert size == -1
        return Shaped(self, self.address, (self.size,), self.dtype, self.device)


class VirtualEvent:
    def __init__(self) -> None:
        self.handle = ctypes.c_void_p()
        va.cuda.cudaEventCreateWithFlags(ctypes.byref(self.handle), 0)
        self.recorded_ns = 0

    def record(self) -> None:
        va.cuda.cudaEventRecord(self.handle, ctypes.c_void_p(va.current_stream()))
        self.recorded_ns = perf_counter_ns()

    def query(self) -> bool:
        try:
            va.cuda.cudaEventQuery(self.handle)
        except va.CudaError:
            return False
        return True

    def elapsed_time(self, end: VirtualEvent) -> float:
        assert self.query()
        assert end.query()
        return (end.recorded_ns - self.recorded_ns) / 1e6


class VirtualGpu:
    """A `Gpu` of the bench. The time between events is that between their records on the host."""

    def __init__(self, rank: int) -> None:
        self.device = rank % len(_core.cuda_devices())
        va.set_device(self.device)
        self._stream = va.Stream()
        self._current = va.use_stream(self._stream)
        self._current.__enter__()  # until the process ends
        self.arrays = ArrayLibrary(
            make=self._make,
            fill=lambda array, value: array.fill(value),
            write=lambda flat, block: flat.set(block),
            read=lambda flat: flat.numpy(),
        )

    def _make(self, shape: Sequence[int], dtype: str) -> Shaped:
        a = va.empty(tuple(shape), dtype)
        return Shaped(a, a.address, a.shape, a.dtype, a.device)

    def event(self) -> VirtualEvent:
        return VirtualEvent()

    def synchronize(self) -> None:
        va.synchronize()

    def copy_call(self, nbytes: int) -> Call:
        nbytes = min(nbytes, 1 << 20)  # of the machine that all ranks share
        to, source = va.empty(nbytes, "uint8"), va.zeros(nbytes, "uint8")
        return lambda: to.copy_from(source)

    def capture(self, call: Call) -> Call:
        graph = va.Graph()
        with graph.capture(va.THREAD_LOCAL):
            call()
        return graph.launch


def stand_in_for_torch() -> None:
    """From now on the bench's GPUs are virtual, where it asks for torch's."""
    drivers.Gpu = VirtualGpu  # type: ignore[assignment,misc]


if __name__ == "__main__":
    stand_in_for_torch()
    add_small_list()
    raise SystemExit(main())
