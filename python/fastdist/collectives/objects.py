"""Collectives of Python objects, by pickle."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np

import fastdist._core as _core
from fastdist.collectives.arguments import to_rank
from fastdist.collectives.types import Ranks
from fastdist.errors import FastdistError, UnsupportedError

T = TypeVar("T")
Bytes = np.ndarray[Any, np.dtype[Any]]

_PADDED_BYTES = 1 << 16  # of all ranks' objects; one exchange is faster than a broadcast by each


def broadcast(comm: Ranks, value: T, root: int, timeout: float | None) -> T:
    """Return the root's object on every rank.

    Raises:
        FastdistError: the root could not pickle its object; the root raises PicklingError.
    """
    data, failure = None, None
    if comm.rank == root:
        try:
            data = _pickled(value)
        except Exception as error:  # raised below, after the other ranks know
            failure = error
    size = np.array([-1 if data is None else data.size], np.int64)
    keywords = {"root": root, "timeout": timeout, "within": "broadcast_object"}
    comm.calls.broadcast(size, **keywords)
    if failure is not None:
        raise failure
    if size[0] < 0:
        raise FastdistError(f"rank {root} could not pickle its object", (root,))
    buffer = np.empty(int(size[0]), np.uint8) if data is None else data
    comm.calls.broadcast(buffer, **keywords)
    return value if comm.rank == root else pickle.loads(buffer.data)


def all_gather(comm: Ranks, value: T, timeout: float | None) -> list[T]:
    """Return the objects of all ranks, in rank order."""
    data, sizes = _prepared(comm, value, timeout, within="all_gather_object")
    if _are_small(comm, sizes):
        return _unpickled(_rows(comm, data, sizes, timeout))
    return _unpickled(_cut(comm.all_gather(data, splits=sizes, timeout=timeout), sizes))


def gather(comm: Ranks, value: T, root: int, timeout: float | None) -> list[T] | None:
    """Return the objects of all ranks on the root, in rank order; None on the others."""
    root = to_rank(root, "root", comm.world_size)
    data, sizes = _prepared(comm, value, timeout, within="gather_object", root=root)
    if _are_small(comm, sizes):
        rows = _rows(comm, data, sizes, timeout)
        return _unpickled(rows) if comm.rank == root else None
    whole = comm.gather(data, root, splits=sizes, timeout=timeout)
    return None if whole is None else _unpickled(_cut(whole, sizes))


def _are_small(comm: Ranks, sizes: Bytes) -> bool:
    """Return True if padded parts are faster than parts of their own sizes; TPUs have no others."""
    return comm.engine.compiled is None or sizes.max() * sizes.size <= _PADDED_BYTES


def _rows(comm: Ranks, data: Bytes, sizes: Bytes, timeout: float | None) -> list[Bytes]:
    padded = np.zeros(int(sizes.max()), np.uint8)
    padded[: data.size] = data
    rows = comm.all_gather(padded, timeout=timeout).reshape(comm.world_size, -1)
    return [row[:size] for row, size in zip(rows, sizes, strict=True)]


def _cut(whole: Bytes, sizes: Bytes) -> list[Bytes]:
    return np.split(whole, np.cumsum(sizes)[:-1])


def scatter(comm: Ranks, values: Sequence[T] | None, root: int, timeout: float | None) -> T:
    """Return this rank's object of the root's list.

    Raises:
        FastdistError: the root's list was wrong; the root raises the error itself.
    """
    parts: list[Bytes] = []
    failure: Exception | None = None
    if comm.rank == root:
        try:
            if isinstance(values, str | bytes | dict):
                raise TypeError(
                    f"scatter_object takes a list of objects, got {type(values).__name__}"
                )
            parts = [_pickled(each) for each in values or ()]
            if len(parts) != comm.world_size:
                failure = ValueError(
                    f"scatter_object needs one object for each of the {comm.world_size} ranks, "
                    f"got {len(parts)}"
                )
        except Exception as error:  # raised below, after the other ranks know
            failure = error
    known = [each.size for each in parts] if parts and not failure else [-1] * comm.world_size
    sizes = np.array(known)
    comm.calls.broadcast(sizes, root=root, timeout=timeout, within="scatter_object")
    if failure is not None:
        raise failure
    if sizes[0] < 0:
        raise FastdistError(f"rank {root} could not scatter its objects", (root,))
    whole = np.concatenate(parts) if parts else None
    own = np.empty(int(sizes[comm.rank]), np.uint8)
    comm.scatter(whole, root, splits=sizes, out=own, timeout=timeout)
    value: T = pickle.loads(own.data)
    return value


# The messages of objects have tags of their own, so that a receive of an array gets none of them.


def send(comm: Ranks, value: Any, dst: int, tag: int, timeout: float | None) -> None:
    """Send an object to a rank, which calls `recv`."""
    keywords = {"dst": dst, "tag": tag, "timeout": timeout, "within": "send_object"}
    try:
        data = _pickled(value)
    except Exception:
        comm.calls.send(np.array([-1]), **keywords)
        raise
    comm.calls.send(np.array([data.size]), **keywords)
    comm.calls.send(data, **keywords)


def recv(comm: Ranks, src: int, tag: int, timeout: float | None) -> Any:
    """Return the object that a rank sends by `send`."""
    size = np.zeros(1, np.int64)
    comm.calls.recv(size, src=src, tag=tag, timeout=timeout, within="recv_object")
    return _recv_sized(comm, size, src, tag, timeout)


def recv_any(comm: Ranks, tag: int, timeout: float | None) -> tuple[Any, int]:
    """Return the object that a rank sends first by `send`, and that rank."""
    size = np.zeros(1, np.int64)
    if comm.engine.compiled is None:
        raise UnsupportedError("recv_any_object does not work on TPUs")
    seconds = comm.timeout_s if timeout is None else timeout
    receive = _core.Messages(comm.engine.compiled).recv()
    src = receive(size, None, tag, True, seconds, False, True).source
    return _recv_sized(comm, size, src, tag, timeout), src


def _recv_sized(comm: Ranks, size: Bytes, src: int, tag: int, timeout: float | None) -> Any:
    _require_pickled(size, (src,))
    data = np.empty(int(size[0]), np.uint8)
    comm.calls.recv(data, src=src, tag=tag, timeout=timeout, within="recv_object")
    return pickle.loads(data.data)


def _prepared(comm: Ranks, value: Any, timeout: float | None, **call: Any) -> tuple[Bytes, Bytes]:
    """Pickle this rank's object; return it, and the sizes of all ranks' objects.

    `call` is what the user has called, as keywords of a step of it.

    Raises:
        FastdistError: another rank could not pickle its object; that rank raises PicklingError.
    """

    def exchange(size: int) -> Bytes:
        sizes = np.empty(comm.world_size, np.int64)
        comm.calls.all_gather(np.array([size]), out=sizes, timeout=timeout, **call)
        return sizes

    try:
        data = _pickled(value)
    except Exception:
        exchange(-1)
        raise
    sizes = exchange(data.size)
    _require_pickled(sizes, range(comm.world_size))
    return data, sizes


def _require_pickled(sizes: Bytes, ranks: Sequence[int]) -> None:
    failed = tuple(rank for rank, size in zip(ranks, sizes, strict=True) if size < 0)
    if failed:
        raise FastdistError(f"rank {failed[0]} could not pickle its object", failed)


def _pickled(value: Any) -> Bytes:
    try:
        return np.frombuffer(pickle.dumps(value), np.uint8)
    except Exception as error:  # of any type: Python's versions differ, and classes raise their own
        raise pickle.PicklingError(f"could not pickle {type(value).__name__}: {error}") from error


def _unpickled(parts: list[Bytes]) -> list[Any]:
    return [pickle.loads(part.data) for part in parts]
