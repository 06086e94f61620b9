"""The types of the collectives' results. mypy checks this file; nothing runs it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import fastdist as fd
import numpy as np

if TYPE_CHECKING:
    from typing_extensions import assert_type

Floats = np.ndarray[tuple[int], np.dtype[np.float32]]


def methods(comm: fd.Communicator, x: Floats, xs: list[Floats]) -> None:
    assert_type(comm.all_reduce(x), Floats)
    assert_type(comm.all_reduce(xs, "mean", out=xs, compress="bf16", timeout=3.0), list[Floats])
    assert_type(comm.all_reduce(x, async_op=False), Floats)
    assert_type(comm.all_reduce(x, "max", bucket_bytes=1 << 20, async_op=True), fd.Work)
    assert_type(comm.reduce(x, "sum", 1), Floats)
    assert_type(comm.reduce(x, root=1, async_op=True), fd.Work)
    assert_type(comm.broadcast(x, 0, out=x), Floats)
    assert_type(comm.broadcast(x, async_op=True), fd.Work)
    assert_type(comm.all_gather(x, stream=None), Floats)
    assert_type(comm.all_gather(x, async_op=True), fd.Work)
    assert_type(comm.gather(x, 0), Floats | Any)
    assert_type(comm.gather(x, 0, async_op=True), fd.Work)
    assert_type(comm.scatter(x), Floats)
    assert_type(comm.scatter(None, 0, out=x), Floats)
    assert_type(comm.scatter(x, async_op=True, timeout=None), fd.Work)
    assert_type(comm.reduce_scatter(x, "min"), Floats)
    assert_type(comm.reduce_scatter(x, async_op=True), fd.Work)
    assert_type(comm.all_to_all(x, splits=[1, 2]), Floats)
    assert_type(comm.all_to_all(xs, async_op=True), fd.Work)
    assert_type(comm.send(x, 1), Floats)
    assert_type(comm.send(x, 1, async_op=True), fd.Work)
    assert_type(comm.recv(x, 0), Floats)
    assert_type(comm.recv(x, 0, async_op=True), fd.Work)
    assert_type(comm.barrier(async_op=True, timeout=1.0), fd.Work)
    assert_type(comm.all_gather_object("a"), list[str])


def functions(x: Floats) -> None:
    assert_type(fd.all_reduce(x, "mean"), Floats)
    assert_type(fd.all_reduce(x, async_op=True), fd.Work)
    assert_type(fd.scatter(None, out=x), Floats)
    assert_type(fd.barrier(async_op=True), fd.Work)
    assert_type(fd.broadcast_object(3), int)


def mistakes(comm: fd.Communicator, x: Floats) -> None:
    comm.all_reduce(x, "average")  # type: ignore[call-overload]
    comm.all_reduce(x, asynchronous=True)  # type: ignore[call-overload]
    fd.send(x, dst=1, tag=3, async_op=True)  # type: ignore[call-overload]
