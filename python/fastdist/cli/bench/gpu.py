"""A GPU as an array library drives it: what a measurement on GPUs needs besides arrays."""

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
    """The GPU of this rank, and a stream that is its library's current one."""

    device: int
    arrays: ArrayLibrary
    stream: int  # its handle

    def event(self) -> Event:
        """A new event that keeps the time."""

    def record(self, event: Event) -> None:
        """Enqueues it."""

    def is_over(self, event: Event) -> bool:
        """The stream has come to it."""

    def elapsed_ns(self, start: Event, end: Event) -> int:
        """Between two events that the stream has come to."""

    def synchronize(self) -> None:
        """The host waits for everything that was enqueued."""

    def copy_call(self, nbytes: int) -> Call:
        """Enqueues a copy between two buffers of its own."""

    def capture(self, call: Call) -> Call:
        """Makes a graph of what a call enqueues; returns what enqueues the graph."""


def open_gpu(rank: int) -> Gpu:
    """Takes the GPU of a rank, through torch.

    Raises:
        RuntimeError: torch sees no GPU.
    """
    module = importlib.import_module("fastdist.cli.bench.torch_gpu")
    gpu: Gpu = module.open_gpu(gpu_of_rank(rank))
    return gpu


def gpu_of_rank(rank: int) -> int:
    """Ranks take GPUs in turn; where there are more ranks than GPUs, some share one."""
    return rank % len(_core.cuda_devices())


def prepare_for_sharing(nccl_version: int, world_size: int) -> None:
    """Lets a peer's NCCL run several ranks on one GPU, by the settings that fastdist uses itself.

    Args:
        nccl_version: As `ncclGetVersion` returns it, of the library that the peer has loaded.
    """
    if world_size > len(_core.cuda_devices()):
        allow_sharing(nccl_version)


def nccl_version_text(version: int) -> str:
    """`21805` as people write it: 2.18.5."""
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"
