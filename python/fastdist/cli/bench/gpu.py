"""Interface of a GPU for measurements, and the assignment of GPUs to ranks."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, Protocol

import fastdist._core as _core
from fastdist.cli.bench.arrays import ArrayLibrary
from fastdist.collectives.engines.nccl_library import allow_sharing

Event = Any
Call = Callable[[], object]


class Gpu(Protocol):
    """The GPU of this rank; calls go to the current stream of its array library."""

    device: int
    arrays: ArrayLibrary

    def event(self) -> Event:
        """Make an event that records the time."""

    def record(self, event: Event) -> None:
        """Enqueue an event."""

    def is_over(self, event: Event) -> bool:
        """Return True if the stream has reached the event."""

    def elapsed_ns(self, start: Event, end: Event) -> int:
        """Return the time between two events that the stream has reached."""

    def synchronize(self) -> None:
        """Make the host wait for all enqueued work."""

    def copy_call(self, nbytes: int) -> Call:
        """Return a call that enqueues a copy between two new buffers."""

    def capture(self, call: Call) -> Call:
        """Capture a call in a graph; return a call that enqueues the graph."""


def open_gpu(rank: int) -> Gpu:
    """Take the GPU of a rank, through torch.

    Raises:
        RuntimeError: torch sees no GPU.
    """
    module = importlib.import_module("fastdist.cli.bench.torch_gpu")
    gpu: Gpu = module.open_gpu(gpu_of_rank(rank))
    return gpu


def gpu_of_rank(rank: int) -> int:
    """Return the GPU of a rank: ranks take GPUs in turn, and share GPUs if there are too few."""
    return rank % len(_core.cuda_devices())


def prepare_for_sharing(nccl_version: int, world_size: int) -> None:
    """Let a peer's NCCL run several ranks on one GPU, with the settings of fastdist's engine.

    Args:
        nccl_version: Result of `ncclGetVersion` of the peer's library.
    """
    if world_size > len(_core.cuda_devices()):
        allow_sharing(nccl_version)


def nccl_version_text(version: int) -> str:
    """Format `21805` as 2.18.5."""
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"
