"""Collectives on arrays that never change: jax's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from fastdist import Communicator
from ranks import ThreadRanks

jax = pytest.importorskip("jax")


def as_numpy(value: Any) -> np.ndarray[Any, Any]:
    assert isinstance(value, np.ndarray)
    return value


def in_place(comm: Communicator) -> None:
    constant = jax.numpy.ones(3)
    x = constant * (comm.rank + 1)
    total = comm.all_reduce(x)
    assert as_numpy(total).tolist() == [3.0, 3.0, 3.0]
    assert total.dtype == x.dtype
    first, second = comm.all_reduce([x, np.ones(2)], "mean")
    assert as_numpy(first).tolist() == [1.5, 1.5, 1.5]
    assert second.tolist() == [1.0, 1.0]
    assert comm.all_reduce(x, async_op=True).wait().tolist() == [3.0, 3.0, 3.0]
    got = comm.broadcast(x, root=1)
    assert np.asarray(got).tolist() == [2.0, 2.0, 2.0]
    got = comm.reduce(x, root=0)
    assert np.asarray(got).tolist() == [3.0 if comm.rank == 0 else 2.0] * 3
    small = comm.all_reduce(x.astype("bfloat16"))
    assert small.dtype == "bfloat16"
    assert small.astype(float).tolist() == [3.0, 3.0, 3.0]
    assert x.tolist() == [comm.rank + 1.0] * 3
    assert constant.tolist() == jax.numpy.ones(3).tolist() == [1.0, 1.0, 1.0]


def into_out(comm: Communicator) -> None:
    x = jax.numpy.full((2, 2), float(comm.rank + 1))
    out = np.empty((2, 2), np.float32)
    assert comm.all_reduce(x, out=out) is out
    assert out.tolist() == [[3.0, 3.0], [3.0, 3.0]]
    assert as_numpy(comm.all_gather(x)).shape == (4, 2)
    assert as_numpy(comm.reduce_scatter(x)).tolist() == [[3.0, 3.0]]
    assert as_numpy(comm.all_to_all(x))[:, 0].tolist() == [1.0, 2.0]
    for call in (
        lambda: comm.all_reduce(np.ones((2, 2), np.float32), out=x),
        lambda: comm.recv(x, 1 - comm.rank),
    ):
        with pytest.raises(TypeError, match="array of jax, whose arrays never change; use out="):
            call()


@pytest.mark.parametrize("calls", [in_place, into_out])
def test_arrays_are_not_changed(calls: Any) -> None:
    ThreadRanks(2).run(calls)
