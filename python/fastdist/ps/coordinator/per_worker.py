"""Values with one element per worker (tf.distribute.coordinator.PerWorkerValues)."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from fastdist.errors import FastdistError
from fastdist.ps.coordinator.shipping import Definitions

_thread = threading.local()


def set_worker_index(index: int) -> None:
    """Mark this thread as the one that runs functions of a worker."""
    _thread.worker_index = index


def get_worker_index() -> int:
    """Return the index of the worker that runs the calling function.

    Follows tf.distribute.coordinator.experimental_get_current_worker_index.

    Raises:
        FastdistError: called outside a scheduled function.
    """
    index: int | None = getattr(_thread, "worker_index", None)
    if index is None:
        raise FastdistError(
            "get_worker_index must be called in a function that a ClusterCoordinator schedules"
        )
    return index


class PerWorkerValues:
    """One value per worker; a scheduled function receives its worker's value.

    Args:
        values: one for each worker, in the order of the cluster.
    """

    def __init__(self, values: Sequence[Any]) -> None:
        self.values = tuple(values)

    def __repr__(self) -> str:
        return f"<fastdist.PerWorkerValues of {len(self.values)} workers>"

    def __reduce__(self) -> Any:
        return _value_of_this_worker, (self.values,)


class PerWorkerDataset:
    """A dataset that each worker makes for itself; created by the coordinator.

    A scheduled function receives its worker's dataset.
    """

    def __init__(self, definitions: Definitions) -> None:
        self._definitions = definitions

    def __iter__(self) -> Iterator[Any]:
        """Make an iterator on each worker; a scheduled function receives its worker's iterator."""
        iterator = PerWorkerIterator()
        self._definitions.name(iterator, self._definitions.define(partial(iter, self)))
        return iterator


class PerWorkerIterator:
    """An iterator on each worker; only scheduled functions can advance it."""

    def __iter__(self) -> PerWorkerIterator:
        return self

    def __next__(self) -> Any:
        raise FastdistError(
            "the iterator of a per-worker dataset is on the workers: pass it to a scheduled "
            "function, and call next() there"
        )


def _value_of_this_worker(values: Sequence[Any]) -> Any:
    index = get_worker_index()
    if index >= len(values):
        raise FastdistError(f"no value for worker {index}: there are {len(values)} values")
    return values[index]
