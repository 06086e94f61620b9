"""Collectives on arrays of pyarrow, which have no shape and never change; results are numpy's."""

from __future__ import annotations

import numpy as np
import pytest
from fastdist import Communicator
from ranks import ThreadRanks

pytestmark = pytest.mark.slow  # CI installs pyarrow for these tests


def every_collective(comm: Communicator) -> None:
    arrow = pytest.importorskip("pyarrow")
    values = [1.0 + comm.rank, 2.0]
    x = arrow.array(values)
    assert comm.all_gather(x).tolist() == [1.0, 2.0, 2.0, 2.0]
    assert comm.all_reduce(x).tolist() == [3.0, 4.0]
    assert comm.broadcast(x, root=1).tolist() == [2.0, 2.0]
    assert comm.all_to_all(x).tolist() == ([1.0, 2.0] if comm.rank == 0 else [2.0, 2.0])
    assert comm.reduce_scatter(x).tolist() == ([3.0] if comm.rank == 0 else [4.0])
    assert comm.all_reduce(x, out=np.zeros(2)).tolist() == [3.0, 4.0]
    assert x.to_pylist() == values
    with pytest.raises(TypeError, match="pyarrow, whose arrays never change"):
        comm.all_gather(np.zeros(2), out=arrow.array(np.zeros(4)))
    with pytest.raises(TypeError, match="must be a numpy, torch or other DLPack array"):
        comm.all_gather(arrow.array(["text"]))


def test_arrays_of_arrow() -> None:
    ThreadRanks(2).run(every_collective)
