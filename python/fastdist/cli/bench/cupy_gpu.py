"""A GPU through cupy."""

from __future__ import annotations

import importlib
from typing import Any

from fastdist.cli.bench.arrays import cupy_arrays
from fastdist.cli.bench.gpu import Call, Event, Gpu


class CupyGpu:
    """One GPU and a stream of cupy's, both current in this thread from now on."""

    def __init__(self, device: int) -> None:
        cupy: Any = importlib.import_module("cupy")
        cupy.cuda.Device(device).use()
        self._cuda = cupy.cuda
        self._stream = cupy.cuda.Stream(non_blocking=True)  # the default one cannot be captured
        self._stream.use()
        self.stream: int = self._stream.ptr
        self.device = device
        self.arrays = cupy_arrays()

    def event(self) -> Event:
        """See `Gpu`."""
        return self._cuda.Event()

    def record(self, event: Event) -> None:
        """See `Gpu`."""
        event.record(self._stream)

    def is_over(self, event: Event) -> bool:
        """See `Gpu`."""
        return bool(event.done)

    def elapsed_ns(self, start: Event, end: Event) -> int:
        """See `Gpu`."""
        return int(self._cuda.get_elapsed_time(start, end) * 1e6)

    def synchronize(self) -> None:
        """See `Gpu`."""
        self._cuda.runtime.deviceSynchronize()

    def copy_call(self, nbytes: int) -> Call:
        """See `Gpu`."""
        to, source = (self.arrays.make((nbytes,), "uint8") for _ in range(2))
        source.fill(1)
        return lambda: to.data.copy_from_device_async(source.data, nbytes, self._stream)

    def capture(self, call: Call) -> Call:
        """See `Gpu`."""
        mode = self._cuda.runtime.streamCaptureModeThreadLocal
        self._stream.begin_capture(mode)
        try:
            call()
        finally:
            graph = self._stream.end_capture()
        return lambda: graph.launch(self._stream)


def open_gpu(device: int) -> Gpu:
    """See `fastdist.cli.bench.gpu.open_gpu`."""
    return CupyGpu(device)
