"""Collectives of Python objects, by pickle."""

from __future__ import annotations

import pickle
from typing import TypeVar

import numpy as np

from fastdist.collectives.types import Ranks
from fastdist.errors import FastdistError

T = TypeVar("T")


def broadcast(comm: Ranks, value: T, root: int, timeout: float | None) -> T:
    """Return the root's object on every rank.

    Raises:
        FastdistError: the root could not pickle its object; the root raises pickle's own error.
    """
    data, failure = b"", None
    if comm.rank == root:
        try:
            data = pickle.dumps(value)
        except Exception as error:  # raised below, after the other ranks know
            failure = error
    size = np.array([-1 if failure else len(data)], np.int64)
    comm.broadcast(size, root, timeout=timeout)
    if failure is not None:
        raise failure
    if size[0] < 0:
        raise FastdistError(f"rank {root} could not pickle its object", (root,))
    buffer = np.frombuffer(data, np.uint8) if data else np.empty(int(size[0]), np.uint8)
    comm.broadcast(buffer, root, timeout=timeout)
    return value if comm.rank == root else pickle.loads(buffer.data)


def all_gather(comm: Ranks, value: T, timeout: float | None) -> list[T]:
    """Return the objects of all ranks, in rank order."""
    data = np.frombuffer(pickle.dumps(value), np.uint8)
    sizes = comm.all_gather(np.array([data.size], np.int64), timeout=timeout)
    padded = np.zeros(int(sizes.max()), np.uint8)
    padded[: data.size] = data
    rows = comm.all_gather(padded, timeout=timeout).reshape(comm.world_size, -1)
    return [pickle.loads(row[:size].data) for row, size in zip(rows, sizes, strict=True)]
