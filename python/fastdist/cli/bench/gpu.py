"""A GPU as an array library drives it: what a measurement on GPUs needs besides arrays."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import fastdist._core as _core
from fastdist.cli.bench.arrays import ArrayLibrary
from fastdist.collectives.engines.nccl_library import allow_sharing

Event = Any
Call = Callable[[], object]

_MEET_S = 60.0


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


def open_gpu(rank: int, library: str) -> Gpu:
    """Takes the GPU of a rank: with the `torch` or `cupy` library.

    Raises:
        RuntimeError: The library sees no GPU.
    """
    module = importlib.import_module(f"fastdist.cli.bench.{library}_gpu")
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


def meet(folder: Path, name: str, rank: int, make: Callable[[], bytes]) -> bytes:
    """Gives all ranks what rank 0 makes, through a file. Every rank must call.

    Raises:
        TimeoutError: Rank 0 has not come within a minute.
    """
    path = folder / name
    if rank == 0:
        made = make()
        unfinished = path.with_suffix(".part")
        unfinished.write_bytes(made)
        unfinished.rename(path)
        return made
    deadline = time.monotonic() + _MEET_S
    while not path.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"rank 0 has not written {path} within {_MEET_S:.0f} s")
        time.sleep(0.01)
    return path.read_bytes()
