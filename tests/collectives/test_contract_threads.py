"""The contract of communicators, with ranks as threads of one process."""

import time
from concurrent.futures import ThreadPoolExecutor

import fastdist as fd
import numpy as np
import pytest
from contract import CommunicatorContract
from fastdist.errors import FastdistError, PeerFailureError
from ranks import ThreadRanks


class TestThreads(CommunicatorContract):
    ranks_class = ThreadRanks
    worlds = (1, 3)
    slow_worlds = (2, 4, 7)
    doomed_worlds = (3,)
    slow_doomed_worlds = (2,)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_two_threads_at_once(asynchronous: bool) -> None:
    """Other ranks may call in another order, which the calls themselves do not tell."""
    first, second = fd.local_group(2)
    with ThreadPoolExecutor(1) as thread:
        waits = thread.submit(first.barrier)
        time.sleep(0.3)  # it waits by then
        with pytest.raises(FastdistError, match="two threads called collectives of one comm"):
            first.all_reduce(np.ones(2), async_op=asynchronous)
        second.barrier()
        waits.result(10)
    pending = first.all_reduce(np.ones(2), async_op=True)
    with ThreadPoolExecutor(1) as thread:  # after the other's call, which is not waited for
        later = thread.submit(first.all_reduce, np.ones(3))
        second.all_reduce(np.ones(2))
        second.all_reduce(np.ones(3))
        pending.wait()
        later.result(10)


def test_recv_any_ends_when_all_others_have_closed() -> None:
    first, *others = fd.local_group(3)
    for comm in others:
        comm.close()
    with pytest.raises(PeerFailureError, match="all other ranks have closed the communicator"):
        first.recv_any(np.zeros(1), timeout=30)
