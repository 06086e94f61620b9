"""The devices of this machine, and what a replica on each of them needs around its function."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch


def every_device() -> list[torch.device]:
    """All GPUs; the CPU where there is none."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return [torch.device("cuda", i) for i in range(gpus)] or [torch.device("cpu")]


def require_own_gpus(devices: Sequence[torch.device]) -> None:
    """Check that no two replicas of this process have the same GPU.

    Raises:
        ValueError: two have; NCCL needs a process for each rank of a GPU.
    """
    gpus = [device for device in devices if device.type == "cuda"]
    twice = next((gpu for gpu in gpus if gpus.count(gpu) > 1), None)
    if twice is not None:
        raise ValueError(
            f"replicas of one process must have a GPU each, got {twice} for two; to share a GPU "
            "start a process for each replica, by `fastdist run`"
        )


def working_on(devices: Sequence[torch.device]) -> Sequence[AbstractContextManager[None]]:
    """For each device what makes the thread that enters it work there, as the calling thread would.

    On a GPU: on the stream that is current in the calling thread, and with backward in the thread
    that calls it, where hooks and what is computed again know of their replica.
    """
    return [
        _on_gpu(torch.cuda.current_stream(device)) if device.type == "cuda" else nullcontext()
        for device in devices
    ]


@contextlib.contextmanager
def _on_gpu(stream: torch.cuda.Stream) -> Iterator[None]:
    with torch.cuda.stream(stream), torch.autograd.set_multithreading_enabled(False):
        yield


def physical_device(device: torch.device) -> torch.device:
    """torch has one CPU, whatever its number; a GPU without a number is the current one."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu") if device.type == "cpu" else device
