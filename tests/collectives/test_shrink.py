"""Communicators that continue without some of their ranks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid

import fastdist as fd
import pytest
from fastdist import Communicator
from fastdist.errors import UnsupportedError

LIMIT_S = 60.0


@pytest.mark.parametrize("exclude", [[], [0], [4], [-1], [0, 1, 2, 3]])
def test_invalid_ranks_are_refused(exclude: list[int]) -> None:
    comm = fd.local_group(4)[0]
    with pytest.raises(ValueError, match=r"exclude must be some of the ranks 0 to 3"):
        comm.shrink(exclude)
    comm.close()


def test_threads_are_refused() -> None:
    comm = fd.local_group(2)[0]
    with pytest.raises(UnsupportedError, match="make another fastdist"):
        comm.shrink([1])
    comm.close()


def run_ranks(script: str, size: int) -> list[tuple[int, str]]:
    """Return exit status and output of each rank; no rank is ended because another failed."""
    job = uuid.uuid4().hex
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", script],
            env={
                **os.environ,
                **{"RANK": str(rank), "WORLD_SIZE": str(size), "FASTDIST_JOB": job},
                **{"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(size)},
            },
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    out = [rank.communicate(timeout=LIMIT_S)[0].strip() for rank in ranks]
    return [(rank.returncode, text) for rank, text in zip(ranks, out, strict=True)]


def test_survivors_of_a_killed_process_continue() -> None:
    script = """
import os, signal, fastdist as fd, numpy as np
comm = fd.init()
if comm.rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    comm.all_reduce(np.ones(1000))
except fd.errors.PeerFailureError as error:
    comm = comm.shrink(error.ranks)
x = fd.all_reduce(np.full(1000, 1.0))  # the default communicator is the new one
print(comm.rank, comm.world_size, x[0])
if comm.rank == 2:
    raise SystemExit
comm = comm.shrink([2])
print(comm.rank, comm.all_reduce(np.array([comm.world_size]))[0])
"""
    first, killed, second, third = run_ranks(script, 4)
    assert killed == (-signal.SIGKILL, "")
    assert (first, second) == ((0, "0 3 3.0\n0 4"), (0, "1 3 3.0\n1 4"))
    assert third == (0, "2 3 3.0")


def test_groups_shrink_too() -> None:
    script = """
import fastdist as fd, numpy as np
comm = fd.init()
group = comm.subgroup([3, 1, 0])
if group is None:
    raise SystemExit
if group.rank == 1:  # it is excluded, and lives
    try:
        group.barrier()
    except fd.errors.PeerFailureError:
        raise SystemExit(3)
old = group
group = group.shrink([1])
print(group.rank, group.all_reduce(np.array([comm.rank]))[0])
try:
    group.shrink([group.rank])
except ValueError as error:
    print(error)
try:
    old.barrier()
except fd.errors.FastdistError as error:
    print("closed" in str(error))
"""
    first, *others, last = run_ranks(script, 4)
    refused = "exclude must be some of the ranks 0 to 1, without this one, {0}; got [{0}]\nTrue"
    assert first == (0, "1 3\n" + refused.format(1))
    assert last == (0, "0 3\n" + refused.format(0))
    assert others == [(3, ""), (0, "")]


@pytest.mark.slow
def test_ranks_that_exclude_others_do_not_meet() -> None:
    script = """
import fastdist as fd
comm = fd.init()
try:
    comm.shrink([2 if comm.rank == 0 else 0], timeout=3)
except fd.errors.ClusterConfigError as error:
    print("refused")
"""
    # Ranks 1 and 2 agree; rank 0 waits for rank 1 in vain.
    assert run_ranks(script, 3)[0] == (0, "refused")


def test_machines_cannot_shrink() -> None:
    from test_net import MachineThreads

    def body(comm: Communicator) -> str:
        with pytest.raises(UnsupportedError, match="one machine") as error:
            comm.shrink([1 - comm.rank])
        comm.barrier()
        return str(error.value)

    MachineThreads(((0,), (1,))).run(body)
