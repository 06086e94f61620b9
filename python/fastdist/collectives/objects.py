"""Collectives of Python objects, by pickle."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

import fastdist._core as _core
from fastdist.collectives.arguments import to_rank
from fastdist.collectives.hints import refuse_keywords
from fastdist.collectives.types import Ranks
from fastdist.errors import FastdistError, UnsupportedError

T = TypeVar("T")
Bytes = np.ndarray[Any, np.dtype[Any]]

_PADDED_BYTES = 1 << 16  # of all ranks' objects; one exchange is faster than a broadcast by each


class ObjectCalls:
    """The collectives of objects, which `Communicator` inherits.

    A rank whose object cannot be pickled raises PicklingError, the others FastdistError.
    """

    def broadcast_object(
        self: Ranks, value: T, root: int = 0, *, timeout: float | None = None, **unknown: Any
    ) -> T:
        """Return the root's object on every rank, by pickle. Every rank must call."""
        _check(self, "broadcast_object", unknown)
        data, failure = _tried(_pickled, value) if self.rank == root else (None, None)
        size = np.array([-1 if data is None else data.size], np.int64)
        keywords = {"root": root, "timeout": timeout, "within": "broadcast_object"}
        self.calls.broadcast(size, **keywords)
        if failure is not None:
            raise failure
        _require_pickled(size, (root,))
        buffer = np.empty(int(size[0]), np.uint8) if data is None else data
        self.calls.broadcast(buffer, **keywords)
        return value if self.rank == root else pickle.loads(buffer.data)

    def all_gather_object(self: Ranks, value: T, *, timeout: float | None = None) -> list[T]:
        """Return the objects of all ranks, in rank order, by pickle. Every rank must call."""
        _check(self, "all_gather_object")
        data, sizes = _prepared(self, value, timeout, within="all_gather_object")
        if _are_small(self, sizes):
            return _unpickled(_rows(self, data, sizes, timeout))
        return _unpickled(_cut(self.all_gather(data, splits=sizes, timeout=timeout), sizes))

    def gather_object(
        self: Ranks, value: T, root: int = 0, *, timeout: float | None = None, **unknown: Any
    ) -> list[T] | None:
        """Return the objects of all ranks on the root, by pickle; None on the other ranks.

        Every rank must call.
        """
        _check(self, "gather_object", unknown)
        root = to_rank(root, "root", self.world_size)
        data, sizes = _prepared(self, value, timeout, within="gather_object", root=root)
        if _are_small(self, sizes):
            rows = _rows(self, data, sizes, timeout)
            return _unpickled(rows) if self.rank == root else None
        whole = self.gather(data, root, splits=sizes, timeout=timeout)
        return None if whole is None else _unpickled(_cut(whole, sizes))

    def scatter_object(
        self: Ranks,
        values: Sequence[T] | None,
        root: int = 0,
        *,
        timeout: float | None = None,
        **unknown: Any,
    ) -> T:
        """Return this rank's object of the root's list, by pickle. Every rank must call.

        Args:
            values: one object for each rank, on the root; ignored on other ranks, pass None.
            root: the rank that has the objects.

        Raises:
            FastdistError: the root's list was wrong, or could not be pickled; the root raises the
                error itself.
        """
        _check(self, "scatter_object", unknown)
        is_root, n = self.rank == root, self.world_size
        parts, failure = _tried(_all_pickled, values, n) if is_root else (None, None)
        sizes = np.array([-1] * n if parts is None else [each.size for each in parts])
        self.calls.broadcast(sizes, root=root, timeout=timeout, within="scatter_object")
        if failure is not None:
            raise failure
        if sizes[0] < 0:
            raise FastdistError(f"rank {root} could not scatter its objects", (root,))
        whole = None if parts is None else np.concatenate(parts)
        own = np.empty(int(sizes[self.rank]), np.uint8)
        self.scatter(whole, root, splits=sizes, out=own, timeout=timeout)
        value: T = pickle.loads(own.data)
        return value

    # The messages of objects have tags of their own, so that a receive of an array gets none.

    def send_object(
        self: Ranks,
        value: Any,
        dst: int = -1,
        *,
        tag: int = 0,
        timeout: float | None = None,
        **unknown: Any,
    ) -> None:
        """Send an object to one rank, by pickle; it must call `recv_object`."""
        _check(self, "send_object", unknown)
        keywords = {"dst": dst, "tag": tag, "timeout": timeout, "within": "send_object"}
        try:
            data = _pickled(value)
        except Exception:
            self.calls.send(np.array([-1]), **keywords)
            raise
        self.calls.send(np.array([data.size]), **keywords)
        self.calls.send(data, **keywords)

    def recv_object(
        self: Ranks, src: int = -1, *, tag: int = 0, timeout: float | None = None, **unknown: Any
    ) -> Any:
        """Return the object that rank `src` sends by `send_object`."""
        _check(self, "recv_object", unknown)
        size = np.zeros(1, np.int64)
        self.calls.recv(size, src=src, tag=tag, timeout=timeout, within="recv_object")
        return _recv_sized(self, size, src, tag, timeout)

    def recv_any_object(
        self: Ranks, *, tag: int = 0, timeout: float | None = None
    ) -> tuple[Any, int]:
        """Return an object from whichever rank sends first by `send_object`, and that rank."""
        _check(self, "recv_any_object")
        size = np.zeros(1, np.int64)
        if self.engine.compiled is None:
            raise UnsupportedError("recv_any_object does not work on TPUs")
        seconds = self.timeout_s if timeout is None else timeout
        receive = _core.receive_of(self.engine.compiled)
        src = receive(size, None, tag, True, seconds, False, True).source
        return _recv_sized(self, size, src, tag, timeout), src


def _check(comm: Ranks, call: str, unknown: Mapping[str, Any] | None = None) -> None:
    """Raise for keywords that a call does not take, and in a group or join."""
    refuse_keywords(call, unknown or {})
    comm._refuse_inside(call)


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


def _recv_sized(comm: Ranks, size: Bytes, src: int, tag: int, timeout: float | None) -> Any:
    _require_pickled(size, (src,))
    data = np.empty(int(size[0]), np.uint8)
    comm.calls.recv(data, src=src, tag=tag, timeout=timeout, within="recv_object")
    return pickle.loads(data.data)


def _prepared(comm: Ranks, value: Any, timeout: float | None, **call: Any) -> tuple[Bytes, Bytes]:
    """Pickle this rank's object; return it, and the sizes of all ranks' objects.

    `call` is what the user has called, as keywords of a step of it.
    """
    data, failure = _tried(_pickled, value)
    own = np.array([-1 if data is None else data.size])
    sizes = np.empty(comm.world_size, np.int64)
    comm.calls.all_gather(own, out=sizes, timeout=timeout, **call)
    if failure is not None:
        raise failure
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


def _all_pickled(values: Any, size: int) -> list[Bytes]:
    if isinstance(values, str | bytes | dict):
        raise TypeError(f"scatter_object takes a list of objects, got {type(values).__name__}")
    parts = [_pickled(each) for each in values or ()]
    if len(parts) != size:
        raise ValueError(
            f"scatter_object needs one object for each of the {size} ranks, got {len(parts)}"
        )
    return parts


def _tried(make: Callable[..., Any], *args: Any) -> tuple[Any, Exception | None]:
    """Return what a function makes, or its error, to be raised when the other ranks know."""
    try:
        return make(*args), None
    except Exception as error:
        return None, error
