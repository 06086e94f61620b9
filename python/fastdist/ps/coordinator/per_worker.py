"""Values of which each worker has its own (tf.distribute.coordinator.PerWorkerValues)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from fastdist.errors import FastdistError


class _ThreadState(threading.local):
    worker_index: int | None = None


_state = _ThreadState()


def set_worker_index(index: int) -> None:
    """This thread runs functions of a worker from now on."""
    _state.worker_index = index


def get_worker_index() -> int:
    """The index of the worker that runs the scheduled function which calls this.

    Follows tf.distribute.coordinator.experimental_get_current_worker_index.

    Raises:
        FastdistError: called outside such a function.
    """
    if _state.worker_index is None:
        raise FastdistError("get_worker_index is for functions that a ClusterCoordinator schedules")
    return _state.worker_index


class PerWorkerValues:
    """A value of each worker; as an argument of a scheduled function, that of who runs it.

    Args:
        values: one for each worker, in the order of the cluster.
    """

    def __init__(self, values: Sequence[Any]) -> None:
        self.values = tuple(values)

    def __repr__(self) -> str:
        return f"<fastdist.PerWorkerValues of {len(self.values)} workers>"

    def __reduce__(self) -> Any:
        return _own_of, (self.values,)


class PerWorkerDataset:
    """A dataset that each worker makes for itself; made by the coordinator.

    In scheduled functions it is the worker's own dataset.
    """

    def __init__(self, make_iterator: Callable[[PerWorkerDataset], PerWorkerIterator]) -> None:
        self._make_iterator = make_iterator

    def __iter__(self) -> Iterator[Any]:
        """An iterator of each worker; in scheduled functions it is the worker's own."""
        return self._make_iterator(self)


class PerWorkerIterator:
    """An iterator that each worker has; only scheduled functions can take from it."""

    def __iter__(self) -> PerWorkerIterator:
        return self

    def __next__(self) -> Any:
        raise FastdistError(
            "the iterator of a per-worker dataset is on the workers: pass it to a scheduled "
            "function, and call next() there"
        )


def _own_of(values: Sequence[Any]) -> Any:
    index = get_worker_index()
    if index >= len(values):
        raise FastdistError(f"{len(values)} per-worker values, and this is worker {index}")
    return values[index]
