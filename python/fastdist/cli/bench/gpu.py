"""A GPU for measurements, through torch, and the assignment of GPUs to ranks."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import fastdist._core as _core
from fastdist.cli.bench.arrays import torch_arrays

Event = Any
Call = Callable[[], object]


class Gpu:
    """The GPU of this rank and a torch stream, both made current in this thread."""

    def __init__(self, device: int) -> None:
        """Raise RuntimeError if torch sees no GPU."""
        torch: Any = importlib.import_module("torch")
        if not torch.cuda.is_available():
            raise RuntimeError(
                f"torch {torch.__version__} sees no GPU: it was built for "
                f"{'CUDA ' + torch.version.cuda if torch.version.cuda else 'CPUs'}; "
                "install a torch for this machine's CUDA, see pytorch.org"
            )
        torch.cuda.set_device(device)
        self._cuda = torch.cuda
        self._stream = torch.cuda.Stream()  # the default one cannot be captured
        torch.cuda.set_stream(self._stream)
        self.device = device
        self.arrays = torch_arrays(f"cuda:{device}")

    def event(self) -> Event:
        """Make an event that records the time."""
        return self._cuda.Event(enable_timing=True)

    def record(self, event: Event) -> None:
        """Enqueue an event."""
        event.record(self._stream)

    def is_over(self, event: Event) -> bool:
        """Return True if the stream has reached the event."""
        return bool(event.query())

    def elapsed_ns(self, start: Event, end: Event) -> int:
        """Return the time between two events that the stream has reached."""
        return int(start.elapsed_time(end) * 1e6)

    def synchronize(self) -> None:
        """Make the host wait for all enqueued work."""
        self._cuda.synchronize()

    def copy_call(self, nbytes: int) -> Call:
        """Return a call that enqueues a copy between two new buffers."""
        to, source = (self.arrays.make((nbytes,), "uint8") for _ in range(2))
        source.fill_(1)
        return lambda: to.copy_(source)

    def capture(self, call: Call) -> Call:
        """Capture a call in a graph; return a call that enqueues the graph."""
        graph = self._cuda.CUDAGraph()
        # Threads that watch communicators may query their events during the capture.
        with self._cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"):
            call()
        replay: Call = graph.replay
        return replay


def gpu_of_rank(rank: int) -> int:
    """Return the GPU of a rank: ranks take GPUs in turn, and share GPUs if there are too few."""
    return rank % len(_core.cuda_devices())
