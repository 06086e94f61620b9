"""Ranks that have no more data, in the contract of communicators."""

from __future__ import annotations

import importlib.util
import re
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from fastdist import Communicator
from fastdist.errors import CollectiveMismatchError, UnsupportedError


def check_join(comm: Communicator) -> None:
    """Loops of different lengths go on; whoever has left takes part with neutral values."""
    n, r = comm.world_size, comm.rank
    for rounds in (list(range(n)), [2 * (n - k) for k in range(n)], [3] * n, [0] * n):
        results = []
        with comm.join() as joined:
            for _ in range(rounds[r]):
                results.append(comm.all_reduce(np.array([r + 1.0, 1.0])).tolist())
        with_data = [[k for k in range(n) if i < rounds[k]] for i in range(rounds[r])]
        assert results == [[sum(k + 1.0 for k in ranks), len(ranks)] for ranks in with_data]
        assert joined.last_rank == rounds.index(max(rounds))
        comm.barrier()
    if n > 1:
        _check_calls(comm)
        _check_shapes(comm)
        _check_bad_input(comm)
    assert comm.all_reduce(np.array([1])) == n  # it goes on after all that


def _check_calls(comm: Communicator) -> None:
    n, last = comm.world_size, comm.world_size - 1
    others = np.arange(4 * n, dtype=np.float32)
    with comm.join() as joined:
        if comm.rank == last:
            for dtype in (np.int8, np.uint16, np.float64, ml_dtypes.bfloat16):
                x = np.array([[3, 1]], dtype)
                for op in ("sum", "prod", "min", "max"):
                    assert (comm.all_reduce(x.copy(), op) == x).all(), (dtype, op)
            for dtype in (np.float32, ml_dtypes.bfloat16, ml_dtypes.float8_e5m2):
                for op, most in (("min", np.inf), ("max", -np.inf)):
                    assert (comm.all_reduce(np.full(2, most, dtype), op) == most).all()
            for order in ((1, 0, 2), (2, 1, 0)):  # not row-major
                x = np.arange(12.0).reshape(2, 3, 2).transpose(order)[:, None]
                assert (comm.all_reduce(x.copy("K")) == x).all()
            mean = comm.all_reduce(np.array([3.0, 1.0]), "mean")
            assert mean.tolist() == [3 / n, 1 / n]
            for op in ("and", "or", "xor"):
                assert (comm.all_reduce(np.array([5, -7]), op) == [5, -7]).all()
            assert comm.all_reduce(np.array([True, False]), "and").tolist() == [True, False]
            pair: list[Any] = [np.ones(3, np.int32), np.array(2.5)]
            comm.all_reduce(pair)
            assert (pair[0].tolist(), float(pair[1])) == ([1, 1, 1], 2.5)
            pair = [np.ones((2, 3)), np.asfortranarray(np.ones((3, 2)))]
            comm.all_reduce(pair)
            assert (pair[0] == 1).all()
            assert (pair[1] == 1).all()
            assert (comm.all_reduce(others.copy(), compress="bf16") == others).all()
            assert (comm.reduce(others.copy(), root=last) == others).all()
            assert (comm.reduce_scatter(others) == others[4 * last :]).all()
            assert (comm.broadcast(others.copy(), last) == others).all()
            _check_torch(comm)
            comm.barrier()
    assert joined.last_rank == last
    with comm.join():  # a flat array matches any shape
        if comm.rank < last:
            shape = (6,) if comm.rank == 0 else (2, 3)
            one = (1, 1) if comm.rank else ()
            for arrays in ([np.ones(shape)], [np.ones(shape), np.ones(one)], np.ones(shape)):
                comm.all_reduce(arrays)
                assert (arrays[0] == last).all()


def _check_torch(comm: Communicator) -> None:
    if importlib.util.find_spec("torch") is None:
        return
    import torch

    for dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.float32):
        x = torch.tensor([[3.0, 1.0]]).to(dtype)
        for op in ("sum", "prod", "min", "max"):
            assert (comm.all_reduce(x.clone(), op).float() == x.float()).all()


def _check_shapes(comm: Communicator) -> None:
    """All but the first rank go on, by arrays that match without being alike."""
    with comm.join():
        if comm.rank:
            x = np.ones((2, 2) if comm.rank % 2 else 4)
            assert (comm.all_reduce(x) == comm.world_size - 1).all()
            given = np.arange(4.0) if comm.rank == 1 else np.zeros(9)
            out = np.zeros(4)
            assert comm.broadcast(given, 1, out=out) is out
            assert out.tolist() == [0, 1, 2, 3]


def _check_bad_input(comm: Communicator) -> None:
    n, last = comm.world_size, comm.world_size - 1
    x = np.ones(n)
    with comm.join():
        if comm.rank == last:
            joined = re.escape(str(list(range(last))))
            for call in (
                lambda: comm.all_gather(x),
                lambda: comm.all_to_all(x),
                lambda: comm.reduce(x, root=0),
                lambda: comm.broadcast(x, 0),
            ):
                with pytest.raises(UnsupportedError, match=f"have joined: {joined}"):
                    call()
            for refused in (comm.group, comm.join):
                with pytest.raises(ValueError, match="in a join: leave the join first"), refused():
                    pass
            with pytest.raises(ValueError, match="cannot be in a join"):
                comm.all_gather_object(1)
            with pytest.raises(ValueError, match=r"all_reduce in a join takes .* no async_op"):
                comm.all_reduce(x, async_op=True)
    if n > 2:
        with comm.join():
            if comm.rank:
                with pytest.raises(CollectiveMismatchError, match=r"rank 0: join\(\)"):
                    comm.all_reduce(np.ones(comm.rank))
                assert comm.all_reduce(np.ones(1)) == n - 1
    if comm.rank == 0:  # the others are in no join
        with pytest.raises(CollectiveMismatchError), comm.join():
            pass
    else:
        with pytest.raises(CollectiveMismatchError, match=r"rank 0: join\(\)"):
            comm.barrier()
        with pytest.raises(CollectiveMismatchError):
            comm.barrier()
