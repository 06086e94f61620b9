"""The engine for XLA tensors: results on every rank, and errors while tracing."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import fastdist as fd
import numpy as np
import pytest
import torch
from fastdist.errors import CollectiveMismatchError, UnsupportedError
from fastdist.tpu.engine import SpmdEngine
from virtual_devices import ON_CPU, N

needs_xla = pytest.mark.skipif(not ON_CPU, reason="needs torch_xla and PJRT_DEVICE=CPU")


def ranks(mismatch: bool) -> list[Any]:
    """Compare the calls of two processes that trace, simulated by threads; return their errors."""
    caught: list[Any] = [None, None]

    def trace(rank: int, comm: fd.Communicator) -> None:
        x = torch.ones(3 + rank if mismatch else 3)
        mesh: Any = SimpleNamespace(local=[rank], size=2)
        engine = SpmdEngine(mesh, comm.engine)
        try:
            engine._agree("barrier", [])
            engine._agree("all_reduce", [x, x], "max")
        except CollectiveMismatchError as error:
            caught[rank] = error

    comms = fd.local_group(2)
    threads = [threading.Thread(target=trace, args=pair) for pair in enumerate(comms)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return caught


def test_processes_that_trace_compare_what_they_call() -> None:
    assert ranks(mismatch=False) == [None, None]
    for rank, error in enumerate(ranks(mismatch=True)):
        assert error.ranks == (1 - rank,)
        assert "(call 2, seen from rank" in str(error)
        assert f'rank 0: all_reduce(float32 × 6 in a list, op="max") at {__file__}' in str(error)
        assert f'rank 1: all_reduce(float32 × 8 in a list, op="max") at {__file__}' in str(error)


@pytest.fixture(scope="module")
def mesh() -> Any:
    from fastdist.tpu.mesh import Mesh

    return Mesh()


@pytest.fixture
def comm(mesh: Any) -> Any:
    return fd.Communicator(SpmdEngine(mesh), 60)


def inputs(dtype: Any, shape: tuple[int, ...]) -> Any:
    """Make the input of each rank: different rows, with negative numbers."""
    made = torch.arange(N * int(np.prod(shape)), dtype=torch.float64).reshape(N, *shape)
    return ((made * 7) % 11 - 5).to(dtype)


@needs_xla
@pytest.mark.xla
@pytest.mark.parametrize("dtype", ["float32", "float64", "int32", "int64", "bfloat16", "bool"])
@pytest.mark.parametrize("op", ["sum", "mean", "min", "max"])
def test_all_reduce(mesh: Any, comm: Any, op: str, dtype: str) -> None:
    kind = getattr(torch, dtype)
    rows = [inputs(kind, shape) for shape in ((2, 3), (), (0, 2), (5,))]
    own = [mesh.enter(mesh.stack(row), True) for row in rows]
    if op == "mean" and dtype in ("int32", "int64", "bool"):
        with pytest.raises(TypeError, match=f'op="mean" is not defined for dtype {dtype}'):
            comm.all_reduce(own, op)
        return
    assert comm.all_reduce(own, op) is own
    wide = [row.double() for row in rows]
    reductions = {"sum": torch.sum, "mean": torch.mean, "min": torch.amin, "max": torch.amax}
    for reduced, row in zip(own, wide, strict=True):
        wanted = reductions[op](row, 0).to(kind)
        rtol = 1e-2 if dtype == "bfloat16" else 1e-6
        for got in mesh.rows(mesh.leave(reduced, True)):
            torch.testing.assert_close(got[0], wanted, rtol=rtol, atol=0)


@needs_xla
@pytest.mark.xla
def test_calls_that_move_data(mesh: Any, comm: Any) -> None:
    def seen(tensor: Any) -> Any:
        return torch.stack([row[0] for row in mesh.rows(mesh.leave(tensor, True))])

    rows = inputs(torch.float32, (2 * N, 3))
    cases: list[tuple[Callable[[Any], Any], Any]] = [
        (lambda x: comm.all_gather(x), rows.reshape(1, -1, 3).expand(N, -1, 3)),
        (lambda x: comm.broadcast(x, N - 1), rows[-1:].expand(N, -1, 3)),
        (lambda x: comm.reduce_scatter(x, "mean"), rows.mean(0).reshape(N, 2, 3)),
    ]
    for call, wanted in cases:
        torch.testing.assert_close(seen(call(mesh.enter(mesh.stack(rows), True))), wanted)
    comm.barrier()


@needs_xla
@pytest.mark.xla
def test_host_values_are_equal_on_all_ranks(comm: Any) -> None:
    x = np.arange(3.0)
    assert comm.all_reduce(x).tolist() == [0, N, 2 * N]
    assert comm.all_reduce(np.arange(3.0), "mean").tolist() == [0, 1, 2]
    assert comm.all_gather(np.ones((1, 2))).shape == (N, 2)
    assert comm.all_gather_object({"a": 1}) == [{"a": 1}] * N
    assert comm.broadcast_object("b") == "b"


@needs_xla
@pytest.mark.xla
def test_one_all_reduce_for_each_dtype_of_a_list(mesh: Any, comm: Any) -> None:
    kinds = (torch.float32, torch.float64, torch.float32, torch.int32, torch.float64)
    own = [mesh.enter(mesh.stack(inputs(kind, (4,))), True) for kind in kinds]
    comm.all_reduce(own)
    left = [mesh.leave(tensor, True) for tensor in own]
    program = importlib.import_module("torch_xla")._XLAC._get_xla_tensors_hlo(left)
    assert program.count(" all-reduce(") == (3 if N > 1 else 0)


@needs_xla
@pytest.mark.xla
@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda c, x: c.all_reduce(x, "prod"), UnsupportedError, "got op='prod'"),
        (lambda c, x: c.all_reduce(x, "average"), ValueError, "op must be sum, .* got 'average'"),
        (lambda c, x: c.all_reduce(x, out=x[:2]), ValueError, r"\(\(4,\).*got \[\(\(2,\)"),
        (lambda c, x: c.all_reduce(x, compress="fp16"), UnsupportedError, "compress='fp16'"),
        (lambda c, x: c.all_reduce(x, async_op=True), UnsupportedError, "all_reduce: async_op"),
        (lambda c, x: c.broadcast(x, N), ValueError, f"root must be .* to {N - 1}, got {N}"),
        (lambda c, x: c.reduce(x), UnsupportedError, "reduce is not .* use all_reduce"),
        (lambda c, x: c.gather(x), UnsupportedError, "gather is not .* use all_gather"),
        (lambda c, x: c.scatter(x.tile(N)), UnsupportedError, "use broadcast"),
        (lambda c, x: c.all_to_all(x.tile(N)), UnsupportedError, "all_to_all is .* use all_gather"),
        (lambda c, x: c.send(x, 0), UnsupportedError, "send is not supported for XLA tensors"),
        (lambda c, x: c.recv(x, 0), UnsupportedError, "recv is not supported"),
        (
            lambda c, x: c.reduce_scatter(torch.ones(N)),
            ValueError,
            "expected a tensor on XLA devices",
        ),
    ],
)  # fmt: skip
def test_refused(mesh: Any, comm: Any, call: Any, error: Any, message: str) -> None:
    x = mesh.enter(mesh.stack(torch.ones(N, 4)), True)
    with pytest.raises(error, match=message):
        call(comm, x)
