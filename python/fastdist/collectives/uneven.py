"""Collectives of parts that differ in size from rank to rank."""

from __future__ import annotations

import functools
import time
import zlib
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import numpy as np

from fastdist.collectives.arguments import to_integers, to_rank
from fastdist.collectives.arrays import (
    as_list,
    dtype_name,
    for_each,
    require_writable,
    rows_like,
    shape_of,
)
from fastdist.collectives.types import Array, Arrays, Ranks, Work
from fastdist.errors import CollectiveMismatchError, UnsupportedError


def all_gather(
    comm: Ranks, arrays: Arrays, splits: Sequence[int], out: Arrays, keywords: dict[str, Any]
) -> Any:
    """Join arrays of `splits` rows each, by a broadcast per rank.

    `keywords` are those of all collectives.
    """
    rows = _to_rows(comm, "all_gather", splits)
    _check(arrays, rows[comm.rank], f"splits[{comm.rank}]", "array")
    if out is None:
        out = rows_like(arrays, sum(rows))
    _check(out, sum(rows), "the sum of splits", "out")

    def call(rank: int, part: Arrays, **keywords: Any) -> Any:
        keywords |= {"root": rank, "within": "all_gather_splits"}
        if rank == comm.rank:
            return comm.calls.broadcast(arrays, out=part, **keywords)
        return comm.calls.broadcast(part, **keywords)

    return _call_all(comm, _parts(out, rows), call, out, keywords)


def refuse(call: str, stream: Any, async_op: bool) -> None:
    """Raise ValueError for arguments that a call with splits does not take."""
    if stream is not None or async_op:
        raise ValueError(f"{call} with splits takes neither stream nor async_op")


def require_same_call(comm: Ranks, call: str, timeout: float | None = None) -> None:
    """Check that all ranks make one call, which is made of messages. Every rank must call."""
    codes = comm.all_gather(np.array([zlib.crc32(call.encode())]), timeout=timeout)
    if (codes == codes[0]).all():
        return
    calls = comm.all_gather_object(call, timeout=timeout)
    told = "".join(f"\n  rank {rank}: {each}" for rank, each in enumerate(calls))
    others = tuple(rank for rank, each in enumerate(calls) if each != calls[0])
    raise CollectiveMismatchError(f"ranks called different collectives:{told}", others)


def _described(arrays: Arrays) -> str:
    """Return dtypes and shapes without rows."""
    return ", ".join(
        f"{dtype_name(array)} rows of {shape_of(array)[1:]}" for array in as_list(arrays)
    )


def require_same(
    comm: Ranks,
    call: str,
    dtype: str,
    op: str,
    root: int,
    count: int,
    shape: int | Sequence[int],
    timeout: float | None,
) -> None:
    """Compare a call that is made of others, by a name of csrc/core/types.cpp, on all ranks.

    `shape` is that of the array, or a hash of several.
    """
    if comm.engine.compiled is None:
        raise UnsupportedError(f"{call} does not work on TPUs")
    seconds = comm.timeout_s if timeout is None else timeout
    comm.engine.compiled.compare(call, dtype, op, root, count, shape, seconds)


def _require_same_splits(
    comm: Ranks, call: str, arrays: Arrays, root: int, rows: list[int], timeout: float | None
) -> None:
    """Compare a call with the same splits on all ranks."""
    each = as_list(arrays)
    count = sum(rows) * sum(prod(shape_of(array)[1:]) for array in each)
    code = zlib.crc32(f"{_described(arrays)} {rows}".encode())
    dtype = dtype_name(each[0]) if each else "bool"
    require_same(comm, call, dtype, "sum", root, count, code, timeout)


def gather(
    comm: Ranks,
    arrays: Arrays,
    root: int,
    splits: Sequence[int],
    out: Arrays | None,
    timeout: float | None,
) -> Arrays | None:
    """Join arrays of `splits` rows each on the root, by a message from each rank."""
    rows, root = _to_rows(comm, "gather", splits), to_rank(root, "root", comm.world_size)
    _check(arrays, rows[comm.rank], f"splits[{comm.rank}]", "array")
    if comm.rank != root:
        out = None
    elif out is None:
        out = rows_like(arrays, sum(rows))
    if out is not None:
        _check(out, sum(rows), "the sum of splits", "out", arrays)
    _require_same_splits(comm, "gather_splits", arrays, root, rows, timeout)
    with comm.group():
        if rows[comm.rank]:
            comm.send(arrays, root, timeout=timeout)
        if out is not None:
            for rank, part in _parts(out, rows):
                comm.recv(part, rank, timeout=timeout)
    return out


def scatter(
    comm: Ranks,
    arrays: Arrays | None,
    root: int,
    splits: Sequence[int],
    out: Arrays | None,
    timeout: float | None,
) -> Arrays:
    """Give rank i `splits[i]` rows of the root's arrays, by a message to each rank."""
    rows, root = _to_rows(comm, "scatter", splits), to_rank(root, "root", comm.world_size)
    is_root = comm.rank == root
    if is_root:
        _check(arrays, sum(rows), "the sum of splits", "array")
    if out is None:
        out = rows_like(arrays, rows[root])
    _check(out, rows[comm.rank], f"splits[{comm.rank}]", "out", arrays if is_root else None)
    _require_same_splits(comm, "scatter_splits", out, root, rows, timeout)
    with comm.group():
        if is_root:
            for rank, part in _parts(arrays, rows):
                comm.send(part, rank, timeout=timeout)
        if rows[comm.rank]:
            comm.recv(out, root, timeout=timeout)
    return out


def reduce_scatter(
    comm: Ranks,
    arrays: Arrays,
    op: Any,
    splits: Sequence[int],
    out: Arrays,
    keywords: dict[str, Any],
) -> Any:
    """Give rank i `splits[i]` rows of the reduced arrays, by a reduce per rank.

    `keywords` are those of all collectives.
    """
    rows = _to_rows(comm, "reduce_scatter", splits)
    _check(arrays, sum(rows), "the sum of splits", "array")
    if out is None:
        out = rows_like(arrays, rows[comm.rank])
    _check(out, rows[comm.rank], f"splits[{comm.rank}]", "out")

    def call(rank: int, part: Arrays, **keywords: Any) -> Any:
        keywords |= {"op": op, "root": rank, "within": "reduce_scatter_splits"}
        return comm.calls.reduce(part, out=out if rank == comm.rank else None, **keywords)

    return _call_all(comm, _parts(arrays, rows), call, out, keywords)


def exchange_counts(
    comm: Ranks, arrays: Arrays, splits: Sequence[int], out: Arrays | None, timeout: float | None
) -> tuple[Arrays, list[int]]:
    """Prepare an all_to_all that sends `splits[i]` rows to rank i. Every rank must call.

    Returns:
        `out`, or new arrays of its shape; and the elements that each rank sends to each rank, for
        one array after the other.
    """
    comm._refuse_inside("all_to_all with splits")
    row = np.array([to_integers(splits, "splits")], np.int64)
    shapes = [shape_of(array)[1:] for array in as_list(arrays)]
    for array in as_list(arrays):
        rows = (*shape_of(array), 0)[0]
        if row.shape[1] != comm.world_size or row.min() < 0 or row.sum() != rows:
            raise ValueError(
                f"splits must be {comm.world_size} numbers that add up to the array's "
                f"{rows} rows, got {list(splits)}"
            )
    # With a hash of the shapes of rows, 0 of flat ones, which fit all of their size.
    code = zlib.crc32(repr(shapes).encode()) if any(len(shape) > 1 for shape in shapes) else 0
    everyone = np.empty((comm.world_size, comm.world_size + 1), np.int64)
    own = np.append(row, [[code]], axis=1)
    comm.calls.all_gather(own, out=everyone, timeout=timeout, within="all_to_all_splits")
    table, codes = everyone[:, :-1], everyone[:, -1]
    if len(set(codes) - {0}) > 1:
        told = comm.all_gather_object(shapes, timeout=timeout)
        raise CollectiveMismatchError(
            "all_to_all of rows that differ in shape:"
            + "".join(f"\n  rank {rank}: {each}" for rank, each in enumerate(told)),
            tuple(rank for rank, each in enumerate(codes) if each not in (0, codes[comm.rank])),
        )
    counts: list[int] = []
    for shape in shapes:
        counts += (table.ravel() * prod(shape)).tolist()
    if out is None:
        out = rows_like(arrays, int(table[:, comm.rank].sum()))
    return out, counts


class Works:
    """Several calls, as one `Work`; a function makes its result of theirs."""

    def __init__(self, works: Sequence[Work], result_of: Callable[[list[Any]], Any]) -> None:
        self._works = works
        self._result_of = result_of

    def is_done(self) -> bool:
        """See `Work.is_done`."""
        return all(work.is_done() for work in self._works)

    def wait(self, timeout: float | None = None) -> Any:
        """See `Work.wait`."""
        began = time.monotonic()
        results = [work.wait(timeout) for work in self._works[:1]]
        for work in self._works[1:]:
            left = None if timeout is None else max(0.0, began + timeout - time.monotonic())
            results.append(work.wait(left))
        return self._result_of(results)


def _call_all(
    comm: Ranks,
    parts: Sequence[tuple[int, Arrays]],
    call: Callable[..., Any],
    result: Any,
    keywords: dict[str, Any],
) -> Any:
    """Call for the rows of each rank: as a group, or one by one where a group cannot be."""
    if keywords["async_op"] or keywords["stream"] is not None:
        works = [call(*part, **keywords) for part in parts]
        return Works(works, lambda _: result) if keywords["async_op"] else result
    with comm.group():
        for part in parts:
            call(*part, timeout=keywords["timeout"])
    return result


def _parts(arrays: Arrays, rows: Sequence[int]) -> list[tuple[int, Arrays]]:
    """Return each rank that has rows, with views of them."""
    ends = np.cumsum(rows).tolist()
    return [
        (rank, for_each(arrays, functools.partial(_rows, begin=ends[rank] - n, end=ends[rank])))
        for rank, n in enumerate(rows)
        if n > 0
    ]


def _to_rows(comm: Ranks, call: str, splits: Sequence[int]) -> list[int]:
    comm._refuse_inside(f"{call} with splits")
    rows = to_integers(splits, "splits")
    if len(rows) != comm.world_size or min(rows) < 0:
        raise ValueError(
            f"splits must be the rows of each of the {comm.world_size} ranks, got {list(splits)}"
        )
    return rows


def _check(
    arrays: Arrays, rows: int, expected: str, argument: str, like: Arrays | None = None
) -> None:
    if argument == "out":
        require_writable(arrays)
    for array in as_list(arrays):
        shape = shape_of(array) or (1,)
        if shape[0] != rows:
            raise ValueError(f"{argument} must have {rows} rows, {expected}, got shape {shape}")
    if like is not None and _described(arrays) != _described(like):
        raise ValueError(f"{argument} must have {_described(like)}, got {_described(arrays)}")


def _rows(array: Array, begin: int, end: int) -> Array:
    if not hasattr(array, "shape") or isinstance(array, memoryview):
        array = np.asarray(memoryview(array))
    return array[begin:end] if shape_of(array) else array
