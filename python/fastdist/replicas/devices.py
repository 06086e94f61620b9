"""The devices of this machine, and what a replica on each of them needs around its function."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch


def every_device() -> list[torch.device]:
    """All GPUs; the CPU where there is none."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return [torch.device("cuda", i) for i in range(gpus)] or [torch.device("cpu")]


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


def usable_device(name: str | torch.device) -> torch.device:
    """A device as torch has it: one CPU, whatever its number, and GPUs with numbers.

    Raises:
        ValueError: torch cannot use it.
    """
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"{name!r} is not a device of torch: {error}") from None
    if device.type == "cpu":
        return torch.device("cpu")
    if device.type == "cuda":
        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if not gpus:
            build = "sees no GPU" if torch.version.cuda else "is built without CUDA"
            raise ValueError(f"{device} cannot be used: this torch {build}")
        if device.index is None:
            return torch.device("cuda", torch.cuda.current_device())
        if device.index >= gpus:
            raise ValueError(f"{device} cannot be used: this machine has {gpus} GPUs, from 0 on")
        return device
    try:
        torch.empty(0, device=device)
    except (RuntimeError, NotImplementedError, AssertionError) as error:
        raise ValueError(f"{device} cannot be used: {error}") from None
    return device


def usable_devices(names: Sequence[str | torch.device], argument: str) -> list[torch.device]:
    """`usable_device` of each.

    Raises:
        TypeError: not a sequence.
        ValueError: it is empty, or torch cannot use one of them.
    """
    if isinstance(names, str) or not isinstance(names, Sequence):
        raise TypeError(f'{argument} must be a list, such as ["cpu:0", "cpu:1"], got {names!r}')
    if not names:
        raise ValueError(f"{argument} must not be empty; None takes what the machine has")
    return [usable_device(name) for name in names]


def use_own_cores(replicas: int) -> None:
    """Divide this machine's cores among its replicas, unless OMP_NUM_THREADS says otherwise."""
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // replicas))
