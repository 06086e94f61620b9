"""Separate random streams for the replicas, seeded from the process's default generator.

At every run each process draws one number from torch's default generator; processes that were
seeded alike draw the same number. The number and the replica's id give the seed of the replica's
stream. After the run the default generator has the state that the draw left, so that random numbers
drawn outside `run` stay the same on all processes, and `torch.manual_seed` alone makes a whole job
reproducible.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from fastdist.replicas.context import ReplicaContext

_MIX = 0x9E3779B97F4A7C15  # 2^64 divided by the golden ratio: separates the seeds of streams


def draw_seed() -> int:
    """Draw a number from the default generator; equal on processes with equal seeds."""
    return int(torch.empty((), dtype=torch.int64).random_())


def stream_seed(seed: int, number: int) -> int:
    """Return the seed of one of several streams, such as a replica's.

    The CPU's generator takes the lowest 32 bits: they differ for 2^32 numbers.
    """
    return (seed + (number + 1) * _MIX) & (2**63 - 1)


@contextmanager
def replica_stream(context: ReplicaContext, seed: int) -> Iterator[None]:
    """Return a context manager: this process's default generators give the replica's stream."""
    generators = [torch.default_generator, *_of_gpu(context.device)]
    before = [generator.get_state() for generator in generators]
    for generator in generators:
        generator.manual_seed(stream_seed(seed, context.replica_id_in_sync_group))
    try:
        yield
    finally:
        for generator, state in zip(generators, before, strict=True):
            generator.set_state(state)


class CommonStream:
    """Switches this process's default generators to a stream that all replicas share, and back."""

    def __init__(self, device: torch.device, seed: int) -> None:
        self._device = device
        self._seed = seed
        self._switches = 0
        self._before: list[tuple[torch.Generator, torch.Tensor]] = []

    def enter(self) -> None:
        """Switch to the common stream, at another place each time."""
        self._switches += 1
        is_capturing = self._device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        gpu = [] if is_capturing else _of_gpu(self._device)  # which a captured graph seeds itself
        for generator in (torch.default_generator, *gpu):
            self._before.append((generator, generator.get_state()))
            generator.manual_seed(stream_seed(self._seed, -1 - self._switches))

    def leave(self) -> None:
        """Switch back to the replica's stream, where it was left."""
        for generator, state in self._before:
            generator.set_state(state)
        self._before.clear()


def _of_gpu(device: torch.device) -> list[torch.Generator]:
    """Return torch's default generator of a GPU; an empty list for other devices."""
    if device.type != "cuda":
        return []
    torch.cuda.init()  # type: ignore[no-untyped-call]
    index = torch.cuda.current_device() if device.index is None else device.index
    return [torch.cuda.default_generators[index]]
