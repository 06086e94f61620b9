"""GPUs for measurements: a GPU through torch, and the GPUs of the ranks."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from functools import partial
from typing import Any

import fastdist._core as _core
from fastdist.cli.bench.driver import Call, torch_arrays


class Gpu:
    """The GPU of this rank and a torch stream, both made current in this thread."""

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
        self._stream = torch.cuda.Stream()  # the default one cannot be captured
        torch.cuda.set_stream(self._stream)
        self.event = partial(torch.cuda.Event, enable_timing=True)
        self.synchronize = torch.cuda.synchronize
        self.device = device
        self.arrays = torch_arrays(f"cuda:{device}")

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


@dataclass(frozen=True, slots=True)
class Placement:
    """The GPUs of a run on one machine."""

    names: tuple[str, ...]  # of all GPUs
    of_rank: tuple[int, ...]  # GPU of each rank

    @property
    def is_shared(self) -> bool:
        """True if two ranks have the same GPU."""
        return len(set(self.of_rank)) < len(self.of_rank)

    @property
    def sharing(self) -> str:
        """`2 ranks share GPU 0`, for every shared GPU; empty if each rank has its own GPU."""
        counts = {gpu: self.of_rank.count(gpu) for gpu in sorted(set(self.of_rank))}
        return ", ".join(f"{n} ranks share GPU {gpu}" for gpu, n in counts.items() if n > 1)

    def __str__(self) -> str:
        used = [self.names[gpu] for gpu in sorted(set(self.of_rank))]
        kinds = ", ".join(f"{used.count(name)} x {name}" for name in dict.fromkeys(used))
        return "; ".join(filter(None, (kinds, self.sharing)))


def place_ranks(ranks: int) -> Placement:
    """Return the GPUs of the ranks of a run."""
    devices = _core.cuda_devices()
    if not devices:
        raise ValueError(f"no GPU: {_core.why_no_cuda()}")
    of_rank = tuple(map(gpu_of_rank, range(ranks)))
    return Placement(tuple(device.name for device in devices), of_rank)
