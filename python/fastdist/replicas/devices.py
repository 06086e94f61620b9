"""The devices of this machine, and the context in which a replica computes on a device."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Sequence

import torch

_OF_TENSORFLOW = re.compile(r"(/.*)?[/:]?(?P<kind>[CG]PU)(?P<index>:\d+)?", re.IGNORECASE)


def every_device() -> list[torch.device]:
    """Return all GPUs; the CPU on a machine without GPUs."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return [torch.device("cuda", i) for i in range(gpus)] or [torch.device("cpu")]


@contextlib.contextmanager
def working_on_gpu(device: torch.device) -> Iterator[None]:
    """Return a context manager: code inside computes on the GPU, on its current stream.

    Backward runs in the thread that calls it, so that hooks and recomputed functions know their
    replica.
    """
    stream = torch.cuda.current_stream(device)
    with torch.cuda.stream(stream), torch.autograd.set_multithreading_enabled(False):
        yield


def usable_device(name: str | torch.device) -> torch.device:
    """Convert a name to a device that torch can use: "cpu" without a number, GPUs with a number."""
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError) as error:
        hint = f": {error}"
        if not isinstance(name, str):  # torch's reasons are about its overloads, or accelerators
            hint = '; write its name, such as "cpu" or "cuda:0"'
        elif found := _OF_TENSORFLOW.fullmatch(str(name)):
            kind, index = found["kind"].lower().replace("gpu", "cuda"), found["index"] or ""
            hint = f'; use "{kind}{index}"{hint}'
        raise ValueError(f"{name!r} is not a torch device{hint}") from None
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
            raise ValueError(f"{device} cannot be used: this machine has GPUs 0 to {gpus - 1}")
        return device
    try:
        torch.ones(1, device=device).item()
    except Exception as error:  # each device module raises others
        raise ValueError(f"{device} cannot be used: {error}") from None
    return device


def usable_devices(names: Sequence[str | torch.device], argument: str) -> list[torch.device]:
    """Convert each name of a replica's device by `usable_device`."""
    if isinstance(names, str) or not isinstance(names, Sequence):
        raise TypeError(f'{argument} must be a list, such as ["cpu:0", "cpu:1"], got {names!r}')
    if not names:
        raise ValueError(f"{argument} must not be empty; None uses all GPUs, or else the CPU")
    devices = [usable_device(name) for name in names]
    for device in devices:
        if len(devices) > 1 and device.type not in ("cpu", "cuda"):
            raise ValueError(
                f"several replicas can be on cpu and cuda devices, got {device}; for the cores of "
                "a TPU there is fd.TPUStrategy"
            )
    return devices


def use_own_cores(replicas: int) -> None:
    """Divide this machine's cores among its replicas, unless OMP_NUM_THREADS is set."""
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // replicas))
