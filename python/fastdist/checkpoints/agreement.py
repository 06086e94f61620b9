"""Steps of saving and restoring that all ranks take together: if one rank fails, all raise."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import TypeVar

from torch import nn

from fastdist.collectives.communicator import Communicator
from fastdist.collectives.init import existing_communicator
from fastdist.errors import DamagedCheckpointError, FastdistError
from fastdist.strategies.replicated import replicas_of

T = TypeVar("T")
# Classes of the exception that other ranks raise: the first that fits the original.
_KINDS = (
    FileNotFoundError,
    FileExistsError,
    OSError,
    DamagedCheckpointError,
    ValueError,
    TypeError,
    FastdistError,
    RuntimeError,
)


class Ranks:
    """The ranks that save and restore a checkpoint together; rank 0 reads and writes files.

    They are the replicas of the strategy in whose scope the modules were made, or else the ranks of
    `fastdist.init`, or else this process alone.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._strategy = replicas_of(modules)

    def communicator(self) -> AbstractContextManager[Communicator | None]:
        """Return a context manager that gives the communicator; None if this process is alone."""
        if self._strategy is not None:
            return self._strategy.communicator()
        world = existing_communicator()
        if world is not None and world.world_size == 1:
            world = None
        return contextlib.nullcontext(world)


def run_on_all(workers: Communicator | None, work: Callable[[], T]) -> T:
    """Call `work` on every rank; if it fails on one, all raise an exception of that class."""
    if workers is None:
        return work()
    try:
        result = work()
    except Exception as error:
        kind = next((kind for kind in _KINDS if isinstance(error, kind)), RuntimeError)
        workers.all_gather_object((kind, str(error)))
        raise
    for rank, other in enumerate(workers.all_gather_object(None)):
        if other is not None:
            kind, message = other
            raise kind(f"rank {rank}: {message}")
    return result


def broadcast_result(workers: Communicator | None, make: Callable[[], T]) -> T:
    """Call `make` on rank 0, and return its result, or raise its exception, on every rank."""
    if workers is None:
        return make()
    result = run_on_all(workers, lambda: make() if workers.rank == 0 else None)
    return workers.broadcast_object(result)  # type: ignore[return-value]
