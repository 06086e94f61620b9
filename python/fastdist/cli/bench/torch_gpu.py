"""A GPU through torch."""

from __future__ import annotations

import importlib
from typing import Any

from fastdist.cli.bench.arrays import torch_arrays
from fastdist.cli.bench.gpu import Call, Event, Gpu


class TorchGpu:
    """One GPU and a torch stream, both made current in this thread."""

    def __init__(self, device: int) -> None:
        torch: Any = importlib.import_module("torch")
        if not torch.cuda.is_available():
            raise RuntimeError(
                f"torch {torch.__version__} sees no GPU: it was built for "
                f"{'CUDA ' + torch.version.cuda if torch.version.cuda else 'CPUs'}; "
                "install a torch for this machine's CUDA, see pytorch.org"
            )
        torch.cuda.set_device(device)
        self._cuda = torch.cuda
        self._torch = torch
        self._stream = torch.cuda.Stream()  # the default one cannot be captured
        torch.cuda.set_stream(self._stream)
        self.device = device
        self.arrays = torch_arrays(f"cuda:{device}")

    def event(self) -> Event:
        return self._cuda.Event(enable_timing=True)

    def record(self, event: Event) -> None:
        event.record(self._stream)

    def is_over(self, event: Event) -> bool:
        return bool(event.query())

    def elapsed_ns(self, start: Event, end: Event) -> int:
        return int(start.elapsed_time(end) * 1e6)

    def synchronize(self) -> None:
        self._cuda.synchronize()

    def copy_call(self, nbytes: int) -> Call:
        to, source = (self.arrays.make((nbytes,), "uint8") for _ in range(2))
        source.fill_(1)
        return lambda: to.copy_(source)

    def capture(self, call: Call) -> Call:
        graph = self._cuda.CUDAGraph()
        # Threads that watch communicators may query their events during the capture.
        with self._cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"):
            call()
        replay: Call = graph.replay
        return replay


def open_gpu(device: int) -> Gpu:
    """See `fastdist.cli.bench.gpu.open_gpu`."""
    return TorchGpu(device)
