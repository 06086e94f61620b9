"""Ranks that wait for each other get an error at once, and other waits do not."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from fastdist import Communicator
from fastdist.collectives.engines.host import HostEngine
from fastdist.collectives.engines.net import NetEngine, Rendezvous
from fastdist.collectives.rendezvous.connections import listen_at
from fastdist.errors import CollectiveMismatchError, PeerFailureError
from ranks import ProcessRanks, ThreadRanks
from test_net import LOCAL, TIMEOUT_S

Call = Callable[[Communicator], Any]
Make = Callable[[Communicator], list[Communicator]]


class MachineRanks(ProcessRanks):
    """Ranks as processes, each on a machine of its own."""

    def run(self, function: Callable[..., Any], *args: Any, limit_s: float = 150) -> list[Any]:
        return super().run(call_across_machines, function, *args, limit_s=limit_s)


def call_across_machines(comm: Communicator, function: Callable[..., Any], *args: Any) -> Any:
    made = across_machines(comm, "job")
    try:
        return function(made, *args)
    finally:
        made.close()


@pytest.fixture(
    params=[ThreadRanks, ProcessRanks, MachineRanks], ids=["threads", "processes", "machines"]
)
def ranks_of(request: pytest.FixtureRequest) -> Iterator[Any]:
    made: list[Any] = []

    def make(size: int) -> Any:
        made.append(request.param(size))
        return made[-1]

    yield make
    for ranks in made:
        ranks.close()


def send_to_next(comm: Communicator) -> None:
    comm.send(np.ones(3), (comm.rank + 1) % comm.world_size)


def barrier_or_send(comm: Communicator) -> None:
    if comm.rank == 0:
        comm.barrier()
    else:
        comm.send(np.ones(3), 0)


def reduce_or_receive(comm: Communicator) -> None:
    if comm.rank == comm.world_size - 1:
        comm.recv(np.ones(1 << 20), 0)
    else:
        comm.all_reduce(np.ones(1 << 20))


def receive_from_each_other(comm: Communicator) -> None:
    comm.all_reduce(np.ones(2))
    comm.recv(np.ones(3), (comm.rank + 1) % comm.world_size)


def receive_a_tag_that_nobody_sends(comm: Communicator) -> None:
    if comm.rank == 0:
        comm.recv(np.ones(3), 1, tag=5)
    else:
        comm.send(np.ones(3), 0, tag=6)
        comm.barrier()


def require_error(comm: Communicator, call: Call, names: str) -> None:
    begin = time.monotonic()
    with pytest.raises(CollectiveMismatchError, match="ranks wait for each other") as caught:
        call(comm)
    assert time.monotonic() - begin < 20
    assert caught.value.ranks
    for rank, name in enumerate(names.split()):
        assert name == "?" or f"rank {rank}: {name}(" in str(caught.value), str(caught.value)
    assert f"in {call.__name__}" in str(caught.value)
    with pytest.raises(CollectiveMismatchError, match="cannot be used any more"):
        comm.barrier()


@pytest.mark.parametrize(
    ("call", "size", "names"),
    [
        (barrier_or_send, 2, "barrier send"),
        (reduce_or_receive, 3, "all_reduce ? recv"),  # rank 1 may be late
        (send_to_next, 3, "send send send"),
        (receive_from_each_other, 2, "recv recv"),
        (receive_a_tag_that_nobody_sends, 2, "recv barrier"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_ranks_that_wait_for_each_other(ranks_of: Any, call: Call, size: int, names: str) -> None:
    ranks_of(size).run(require_error, call, names)


def test_rank_that_comes_as_the_others_fail() -> None:
    def check(comm: Communicator, late_s: float) -> None:
        if comm.rank == 1:
            time.sleep(late_s)
        with pytest.raises(CollectiveMismatchError, match="ranks wait for each other"):
            reduce_or_receive(comm)

    for turn in range(20):
        ThreadRanks(3).run(check, 0.001 * (turn % 4))


def two_on_one_machine(comm: Communicator) -> list[Communicator]:
    return [comm.split(0), comm.split(0, key=-comm.rank)]


def two_across_machines(comm: Communicator) -> list[Communicator]:
    return [across_machines(comm, key) for key in ("first", "second")]


def across_machines(comm: Communicator, key: str) -> Communicator:
    listener = listen_at(LOCAL)
    addresses = comm.all_gather_object(listener.getsockname())
    machines = range(comm.world_size)
    (inner,) = HostEngine.of_threads(1)
    found = Rendezvous(comm.rank, machines, key, addresses, listener)
    return Communicator(NetEngine(found, inner, TIMEOUT_S), TIMEOUT_S)


def use_in_crossed_order(comm: Communicator, make: Make) -> None:
    first, second = make(comm)
    for each in (first, second):
        each.all_reduce(np.ones(2))
    calls = [lambda: first.all_reduce(np.ones(2)), lambda: second.broadcast(np.ones(3), 0)]
    begin = time.monotonic()
    with pytest.raises(CollectiveMismatchError, match="ranks wait for each other") as caught:
        calls[comm.rank]()
    assert time.monotonic() - begin < 20
    assert caught.value.ranks
    told = str(caught.value)
    assert "all_reduce(float64 × 2" in told
    assert "broadcast(float64 × 3" in told
    assert told.count("in another communicator, for rank") == 1
    assert told.count("test_deadlock.py") == 2
    comm.barrier()


@pytest.mark.parametrize("make", [two_on_one_machine, two_across_machines])
def test_communicators_used_in_crossed_order(make: Make) -> None:
    ranks = ProcessRanks(2)
    try:
        ranks.run(use_in_crossed_order, make)
    finally:
        ranks.close()


def wait_for_a_rank_that_has_not_looked(comm: Communicator) -> None:
    """Wait for a stopped rank, whose own wait for this one is about to fail."""
    first, second = two_on_one_machine(comm)
    pids = comm.all_gather_object(os.getpid())
    if comm.rank == 0:
        time.sleep(0.5)  # rank 1 waits by then
        os.kill(pids[1], signal.SIGSTOP)
        subprocess.run(["sh", "-c", f"(sleep 1; kill -CONT {pids[1]}) &"], check=True)
    calls = [lambda: first.all_reduce(np.ones(2)), lambda: second.broadcast(np.ones(3), 0)]
    with pytest.raises(CollectiveMismatchError, match="all_reduce"):
        calls[comm.rank]()
    if comm.rank == 1:
        time.sleep(0.3)  # rank 0, which waits, does not take its error for another deadlock
    comm.barrier()


def wait_for_a_rank_that_still_waits_for_a_closed_one(comm: Communicator) -> None:
    first, _ = two_on_one_machine(comm)
    pids = comm.all_gather_object(os.getpid())
    if comm.rank == 1:
        with pytest.raises(PeerFailureError, match="closed the communicator"):
            first.barrier()
    else:
        time.sleep(0.5)  # rank 1 waits by then
        os.kill(pids[1], signal.SIGSTOP)
        subprocess.run(["sh", "-c", f"(sleep 1; kill -CONT {pids[1]}) &"], check=True)
        first.close()
    comm.barrier()


@pytest.mark.slow
@pytest.mark.parametrize(
    "wait",
    [
        wait_for_a_rank_that_has_not_looked,
        wait_for_a_rank_that_still_waits_for_a_closed_one,
    ],
)
def test_a_wait_that_is_about_to_fail_is_part_of_no_deadlock(wait: Call) -> None:
    ranks = ProcessRanks(2)
    try:
        ranks.run(wait)
    finally:
        ranks.close()


def of_two_machines(comm: Communicator) -> Communicator:
    """Join the ranks of two machines, {0, 1} and {2, 3}."""
    listener = listen_at(LOCAL)
    addresses = comm.all_gather_object(listener.getsockname())
    inner = comm.engine.subset([[0, 1], [2, 3]], TIMEOUT_S)
    found = Rendezvous(comm.rank, [0, 0, 1, 1], "job", addresses, listener)
    return Communicator(NetEngine(found, inner, TIMEOUT_S), TIMEOUT_S)


def cross_machine_and_job(comm: Communicator) -> None:
    job = of_two_machines(comm)
    machine = job.split(comm.rank // 2)
    for each in (job, machine):
        each.barrier()
    call = machine.barrier if comm.rank == 3 else lambda: job.all_reduce(np.ones(2))
    begin = time.monotonic()
    with pytest.raises(CollectiveMismatchError, match="ranks wait for each other") as caught:
        call()
    assert time.monotonic() - begin < 20
    others = {0} if comm.rank == 3 else {2, 3} - {comm.rank}  # by numbers of the communicator
    assert {*caught.value.ranks} == others
    told = str(caught.value)
    assert "all_reduce(float64 × 2" in told, told
    assert "barrier()" in told, told
    assert told.count("test_deadlock.py") == 2, told
    if comm.rank != 3:
        assert "rank 2:" in told or "by their numbers in another communicator" in told, told
    comm.barrier()


def test_job_and_machine_used_in_crossed_order() -> None:
    ranks = ProcessRanks(4)
    try:
        ranks.run(cross_machine_and_job)
    finally:
        ranks.close()


def use_while_a_thread_lives(comm: Communicator, make: Make, wait_s: float) -> None:
    """Call in crossed order, which another thread resolves later."""
    first, second = make(comm)
    waits = threading.Event()
    thread = threading.Thread(target=lambda: (waits.wait(), second.all_reduce(np.ones(2))))
    if comm.rank == 0:
        thread.start()
        threading.Timer(wait_s, waits.set).start()
        first.all_reduce(np.ones(2))
        thread.join()
    else:
        second.all_reduce(np.ones(2))
        first.all_reduce(np.ones(2))


@pytest.mark.parametrize(
    ("make", "wait_s"),
    [(two_on_one_machine, 0.4), pytest.param(two_across_machines, 4.0, marks=pytest.mark.slow)],
)
def test_another_thread_may_still_act(make: Make, wait_s: float) -> None:
    ranks = ProcessRanks(2)
    try:
        ranks.run(use_while_a_thread_lives, make, wait_s)
    finally:
        ranks.close()


def receive_in_another_thread(comm: Communicator, wait_s: float) -> None:
    """Send in one thread, and receive later in another."""
    x = np.full(100_000, comm.rank + 1.0)
    thread = threading.Thread(target=comm.send, args=(x, 1 - comm.rank))
    thread.start()
    time.sleep(wait_s)
    received = comm.recv(np.empty_like(x), 1 - comm.rank)
    thread.join()
    assert (received == 2 - comm.rank).all()
    answer = threading.Timer(wait_s, comm.recv, (np.empty(1), 1 - comm.rank))
    answer.start()
    comm.send(np.ones(1), 1 - comm.rank)
    answer.join()
    comm.barrier()


@pytest.mark.parametrize(
    ("ranks_class", "wait_s"),
    [(ProcessRanks, 0.4), pytest.param(MachineRanks, 4.0, marks=pytest.mark.slow)],
)
def test_another_thread_may_still_receive(ranks_class: type[ProcessRanks], wait_s: float) -> None:
    ranks = ranks_class(2)
    try:
        ranks.run(receive_in_another_thread, wait_s)
    finally:
        ranks.close()


def wait_long(comm: Communicator) -> None:
    """Wait for calls that come late, or were submitted before the wait."""
    x = np.full(3, comm.rank, np.float32)
    if comm.rank == 0:
        received = comm.recv(np.empty(3, np.float32), 1, async_op=True)
        reduced = comm.all_reduce(np.ones(3), async_op=True)
        comm.send(x, 1)
        received.wait()
        reduced.wait()
        comm.barrier()
    else:
        time.sleep(0.4)
        comm.send(x, 0)
        time.sleep(0.4)
        comm.recv(np.empty(3, np.float32), 0)
        time.sleep(0.4)
        comm.all_reduce(np.ones(3))
        time.sleep(0.4)
        comm.barrier()


@pytest.mark.slow
def test_long_waits_that_can_end(ranks_of: Any) -> None:
    ranks = ranks_of(2)
    for _ in range(2):
        ranks.run(wait_long)
