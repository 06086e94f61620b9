"""Errors of the backend "fastdist": ranks that die, disagree or are used wrongly."""

import gc
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
import torch.distributed._functional_collectives as functional  # noqa: E402
from fastdist.cluster.address import reserved_ports  # noqa: E402
from fastdist.collectives.rendezvous.board import StoreBoard  # noqa: E402
from fastdist.errors import ClusterConfigError  # noqa: E402
from fastdist.link.secret import Secret  # noqa: E402
from ranks import ProcessRanks  # noqa: E402


@pytest.fixture(scope="module")
def ranks() -> Iterator[ProcessRanks]:
    ranks = ProcessRanks(3)
    yield ranks
    ranks.close()


def begin(comm: Any, path: Path, backend: str = "fastdist", seconds: float = 30) -> None:
    dist.init_process_group(
        backend,
        init_method=f"file://{path}",
        rank=comm.rank,
        world_size=comm.world_size,
        timeout=timedelta(seconds=seconds),
    )


def calls_that_differ(comm: Any, path: Path) -> str:
    begin(comm, path)
    x = torch.ones(3)
    call = (lambda: dist.broadcast(x, 0)) if comm.rank == 0 else (lambda: dist.all_reduce(x))
    with pytest.raises(dist.DistBackendError) as told:
        call()
    dist.all_reduce(x)  # no data has moved, and the group works on
    assert torch.equal(x, torch.full((3,), 3.0))
    dist.destroy_process_group()
    return str(told.value)


def test_calls_that_differ_are_told_with_their_lines(ranks: ProcessRanks, tmp_path: Path) -> None:
    for text in ranks.run(calls_that_differ, tmp_path / "store"):
        assert "rank 0: broadcast(float32 × 3, root=0)" in text
        assert 'rank 1: all_reduce(float32 × 3, op="sum")' in text
        assert text.count("test_torch_backend_errors.py:") == 3


def sizes_that_differ(comm: Any, path: Path) -> str:
    begin(comm, path)
    with pytest.raises(dist.DistBackendError) as told:
        dist.all_reduce(torch.ones(3 + comm.rank // 2), async_op=True).wait()
    dist.destroy_process_group()
    return str(told.value)


def test_sizes_that_differ_are_told(ranks: ProcessRanks, tmp_path: Path) -> None:
    for text in ranks.run(sizes_that_differ, tmp_path / "store"):
        assert "rank 0: all_reduce(float32 × 3" in text
        assert "rank 2: all_reduce(float32 × 4" in text


def messages_that_differ(comm: Any, path: Path) -> str:
    begin(comm, path)
    text = ""
    if comm.rank < 2:
        move = dist.send if comm.rank == 0 else dist.recv
        with pytest.raises(dist.DistBackendError) as told:
            move(torch.ones(4 - comm.rank), 1 - comm.rank, tag=5)
        text = str(told.value)
    dist.barrier()
    dist.destroy_process_group()
    return text


def test_messages_that_differ_are_told_on_both_ranks(ranks: ProcessRanks, tmp_path: Path) -> None:
    sender, receiver, _ = ranks.run(messages_that_differ, tmp_path / "store")
    for text in (sender, receiver):
        assert "send(float32 × 4, dst=1)" in text
        assert "recv(float32 × 3, src=0)" in text


def a_late_rank(comm: Any, path: Path) -> str:
    begin(comm, path)
    dist.group.WORLD.set_timeout(timedelta(seconds=1))
    if comm.rank == 1:
        time.sleep(4)
        dist.destroy_process_group()
        return ""
    with pytest.raises(dist.DistBackendError) as told:
        dist.all_reduce(torch.ones(3))
    dist.destroy_process_group()
    return str(told.value)


@pytest.mark.slow
def test_a_late_rank_is_named(ranks: ProcessRanks, tmp_path: Path) -> None:
    first, _, last = ranks.run(a_late_rank, tmp_path / "store")
    for text in (first, last):
        assert "waiting for rank 1" in text


def waits_that_end_early(comm: Any, path: Path) -> None:
    begin(comm, path)
    x = torch.ones(3)
    if comm.rank == 0:
        work = dist.all_reduce(x, async_op=True)
        with pytest.raises(dist.DistBackendError, match=r"not finished after 0\.1 s"):
            work.wait(timedelta(seconds=0.1))
        assert not work.is_completed()
        comm.barrier()
        work.wait()
        assert work.is_completed()
        assert work.is_success()
        assert work.exception() is None
    else:
        comm.barrier()
        dist.all_reduce(x)
    dist.destroy_process_group()


def test_a_wait_may_end_before_its_call(ranks: ProcessRanks, tmp_path: Path) -> None:
    ranks.run(waits_that_end_early, tmp_path / "store")


def threads_and_files() -> tuple[int, int]:
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


def pending_at_destroy(comm: Any, path: Path) -> None:
    gc.collect()  # groups that earlier tests left in errors
    threads, files = threads_and_files()
    begin(comm, path)
    group = dist.group.WORLD
    x, y, copied = torch.full((3,), comm.rank + 1.0), torch.zeros(3), torch.zeros(3, 4)
    work: Any = None
    if comm.rank == 0:
        dist.isend(x, 1)
        y += x
        work = dist.all_reduce(y, async_op=True)
        dist.broadcast(copied.T, 1, async_op=True)
    else:
        time.sleep(0.3)
        if comm.rank == 1:
            dist.recv(y, 0)
        y[:] = x
        dist.all_reduce(y)
        dist.broadcast(torch.ones(4, 3), 1)
    dist.destroy_process_group()
    assert y.tolist() == [6, 6, 6]
    if work is not None:
        assert work.wait()
        assert copied.sum() == 12
    del work
    assert group is not None  # and is kept
    until = time.monotonic() + 10  # a thread that was joined has only about ended
    while (now := threads_and_files())[0] > threads or now[1] > files:
        assert time.monotonic() < until, (now, threads, files)


def test_destroy_delivers_pending_calls_and_ends_threads(
    ranks: ProcessRanks, tmp_path: Path
) -> None:
    ranks.run(pending_at_destroy, tmp_path / "store")


def groups_that_are_left(comm: Any, path: Path) -> None:
    begin(comm, path)
    group: Any = dist.group.WORLD
    part = dist.new_group([0, 1])
    if comm.rank == 2:
        with pytest.warns(UserWarning, match="does not belong"):
            dist.all_reduce(torch.ones(2), group=part)
    with pytest.raises(RuntimeError, match="device type meta"):
        dist.all_reduce(torch.ones(2, device="meta"))
    with pytest.raises(ValueError, match="_split_sizes must be"):
        dist.all_to_all_single(torch.ones(3), torch.ones(3), [1, 1], [1, 1])
    dist.destroy_process_group()
    with pytest.raises(dist.DistBackendError, match="closed"):
        group.allreduce([torch.ones(2)])
    with pytest.raises(dist.DistBackendError, match="closed"):
        group.recv([torch.ones(2)], (comm.rank + 1) % 3, 0).wait()
    # Another job of the same processes.
    begin(comm, path.with_name("again"))
    x = torch.ones(2)
    dist.all_reduce(x)
    assert x[0] == comm.world_size
    dist.destroy_process_group()


def test_groups_that_are_left_say_so(ranks: ProcessRanks, tmp_path: Path) -> None:
    ranks.run(groups_that_are_left, tmp_path / "store")


class Stop(Exception):
    pass


def handler_that_raises(comm: Any, path: Path) -> None:
    told = path.with_name("told")

    def stop(*_: Any) -> None:
        told.touch()
        raise Stop

    begin(comm, path)
    x = torch.ones(2)
    if comm.rank == 0:
        signal.signal(signal.SIGALRM, stop)
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(Stop):
            dist.all_reduce(x)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        assert x[0] == comm.world_size
    else:
        while not told.exists():
            time.sleep(0.01)
        dist.all_reduce(x)
    y = torch.ones(2)
    dist.all_reduce(y)
    assert y[0] == comm.world_size
    dist.destroy_process_group()


def test_a_signal_handler_that_raises_ends_no_group(ranks: ProcessRanks, tmp_path: Path) -> None:
    ranks.run(handler_that_raises, tmp_path / "store")


def another_backend(comm: Any, path: Path) -> str:
    name = "gloo" if comm.rank == 2 else "fastdist"
    with pytest.raises(RuntimeError) as told:
        begin(comm, path, name, seconds=2)
    return str(told.value)


@pytest.mark.slow
def test_ranks_with_another_backend_are_named(ranks: ProcessRanks, tmp_path: Path) -> None:
    first, second, _ = ranks.run(another_backend, tmp_path / "store")
    for text in (first, second):
        assert "ranks [2] of 3 did not arrive within 2 s" in text
        assert 'backend "fastdist"' in text


def forked_child(comm: Any, path: Path) -> None:
    begin(comm, path)
    readable, writable = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            dist.all_reduce(torch.ones(2))
        except dist.DistBackendError as error:
            os.write(writable, str(error).encode())
        os._exit(0)
    assert b"forked child cannot use it" in os.read(readable, 4096)
    os.waitpid(child, 0)
    dist.all_reduce(torch.ones(2))
    dist.destroy_process_group()


def test_a_forked_child_cannot_use_a_group(ranks: ProcessRanks, tmp_path: Path) -> None:
    ranks.run(forked_child, tmp_path / "store")


def groups_in_threads(comm: Any, path: Path) -> None:
    from concurrent.futures import ThreadPoolExecutor

    begin(comm, path)
    groups = [dist.new_group() for _ in range(4)]

    def work(group: Any) -> float:
        x = torch.ones(100)
        for _ in range(200):
            dist.all_reduce(x, dist.ReduceOp.AVG, group=group)
        y = torch.ones(5) * comm.rank
        dist.broadcast(y, 1, group=group)
        return float(x.sum() + y.sum())

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(work, groups)) == [105.0] * 4
    dist.destroy_process_group()


def test_threads_use_groups_of_their_own(ranks: ProcessRanks, tmp_path: Path) -> None:
    ranks.run(groups_in_threads, tmp_path / "store")


def a_death(comm: Any, path: Path, how: str) -> str:
    begin(comm, path)
    dist.barrier()
    if comm.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    x = torch.ones(1 << 20)
    calls: dict[str, Any] = {
        "collective": lambda: [dist.all_reduce(x) for _ in range(100)],
        "asynchronous": lambda: [
            dist.all_reduce(x, async_op=True).get_future().wait() for _ in range(100)
        ],
        "message": lambda: dist.recv(x, 2),
        "any source": lambda: dist.recv(x),
    }
    with pytest.raises(dist.DistBackendError) as told:
        calls[how]()
    dist.destroy_process_group()
    return str(told.value)


@pytest.mark.parametrize("how", ["collective", "asynchronous", "message", "any source"])
def test_a_death_ends_the_calls_of_the_others(how: str, tmp_path: Path) -> None:
    ranks = ProcessRanks(3)
    with pytest.raises(AssertionError) as errors:
        ranks.run(a_death, tmp_path / "store", how)
    assert set(errors.value.errors) == {2}  # type: ignore[attr-defined]


def works_in_any_order(comm: Any, path: Path) -> None:
    begin(comm, path)
    size, rank = comm.world_size, comm.rank
    # Groups that ranks use in different orders.
    groups = [dist.new_group() for _ in range(2)]
    for reduce_all in (
        lambda group: group.allreduce([torch.ones(4)]).wait,
        lambda group: functional.all_reduce(torch.ones(4), "sum", group).wait,
    ):
        order = groups if rank == 0 else groups[::-1]
        for wait in [reduce_all(group) for group in order]:
            wait()
    # Futures of collectives do not wait for a receive, which needs a thread for its copy here.
    received = torch.zeros(4, 4)
    work = dist.irecv(received.t()[:, ::2], (rank - 1) % size, tag=5)
    x = torch.ones(3)
    assert dist.all_reduce(x, async_op=True).get_future().wait()[0][0] == size
    given = torch.full((4, 2), float(rank))
    dist.isend(given, (rank + 1) % size, tag=5).wait()
    work.wait()
    assert received.t()[0, 0] == (rank - 1) % size
    # A future that is asked for late.
    work = dist.all_reduce(x, async_op=True)
    work.wait()
    dist.destroy_process_group()
    assert work.get_future().wait()[0][0] == size**2


def test_works_do_not_wait_for_each_other(ranks: ProcessRanks, tmp_path: Path) -> None:
    ranks.run(works_in_any_order, tmp_path / "store")


def memory_of_calls(comm: Any, path: Path) -> list[int]:
    begin(comm, path)
    peer = (comm.rank + 1) % comm.world_size
    control = dist.irecv(torch.zeros(1), (comm.rank - 1) % comm.world_size, tag=99)
    used = []
    for _ in range(3):
        for _ in range(60):
            dist.all_reduce(torch.ones(1 << 18), async_op=True).wait()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        used.append(pages * os.sysconf("SC_PAGE_SIZE") >> 20)
    dist.isend(torch.ones(1), peer, tag=99).wait()
    control.wait()
    dist.destroy_process_group()
    return used


def test_an_open_receive_keeps_no_other_tensors(ranks: ProcessRanks, tmp_path: Path) -> None:
    for used in ranks.run(memory_of_calls, tmp_path / "store"):
        assert used[2] - used[0] < 30, used  # MiB


def wrong_tensors(comm: Any, path: Path) -> None:
    begin(comm, path)
    world: Any = dist.group.WORLD
    size = comm.world_size
    with pytest.raises(ValueError, match="needs at least one tensor"):
        world.allgather_coalesced([[] for _ in range(size)], [])
    with pytest.raises(ValueError, match="needs at least one tensor"):
        dist.all_to_all([], [])
    with pytest.raises(ValueError, match="share memory within itself"):
        dist.broadcast(torch.zeros(4, 1).expand(4, 4), 0, async_op=True)
    with pytest.raises(ValueError, match="tag must not be negative"):
        dist.isend(torch.ones(1), (comm.rank + 1) % size, tag=-1)
    with torch.inference_mode():
        x = torch.ones(2, 3).t()
        work = dist.all_reduce(x, async_op=True)
        time.sleep(0.1)
        work.wait()
        work.get_future().wait()
        assert x[0, 0] == size
    dist.barrier()
    dist.destroy_process_group()


def test_wrong_tensors_are_refused_at_once(ranks: ProcessRanks, tmp_path: Path) -> None:
    ranks.run(wrong_tensors, tmp_path / "store")


def retried(comm: Any, port: int) -> str:
    """Make a group again after rank 1 has come too late for the first one."""
    store = dist.TCPStore("127.0.0.1", port, is_master=comm.rank == 0, wait_for_workers=False)
    place = {"store": store, "rank": comm.rank, "world_size": comm.world_size}
    comm.barrier()  # ranks 0 and 2 begin together
    if comm.rank == 1:
        store.wait(["0 gave up", "2 gave up"])
    patience = timedelta(seconds=60 if comm.rank == 1 else 5)
    with pytest.raises(dist.DistBackendError) as told:
        dist.init_process_group("fastdist", timeout=patience, **place)
    store.set(f"{comm.rank} gave up", "")
    dist.init_process_group("fastdist", timeout=timedelta(seconds=60), **place)
    x = torch.ones(1)
    dist.all_reduce(x)
    assert x.item() == comm.world_size
    comm.barrier()  # rank 0 has the store
    dist.destroy_process_group()
    return str(told.value)


@pytest.mark.slow
def test_a_group_can_be_made_again_after_ranks_gave_up(ranks: ProcessRanks) -> None:
    with reserved_ports(1) as (port,):
        texts = ranks.run(retried, port)
    assert "ranks [1] of 3 did not arrive" in texts[0]
    assert "ranks [1] of 3 did not arrive within" in texts[1]
    assert "gave up before rank 1 was connected" in texts[1]


def one_store(comm: Any, port: int) -> None:
    store = dist.TCPStore("127.0.0.1", port, comm.world_size, comm.rank == 0)
    for number in range(6):
        place = {"rank": comm.rank, "world_size": comm.world_size}
        dist.init_process_group("fastdist", store=store, timeout=timedelta(seconds=20), **place)
        x = torch.ones(2)
        dist.all_reduce(x)
        assert x[0] == comm.world_size, number
        dist.destroy_process_group()


def test_jobs_follow_each_other_in_one_store(ranks: ProcessRanks) -> None:
    with reserved_ports(1) as (port,):
        ranks.run(one_store, port)


def test_a_rank_that_comes_later_hears_why_others_gave_up() -> None:
    store = dist.HashStore()
    late, first = (StoreBoard(store, rank, 2, time.monotonic() + 20, 20) for rank in range(2))
    first.give_up(Secret(b"", "FASTDIST_SECRET").mismatch(1, 0))
    late.give_up(KeyboardInterrupt())  # a reason, but not the first one
    with pytest.raises(ClusterConfigError) as told:
        late.allgather("sealed with another secret")
    assert told.value.ranks == (0,)
    text = str(told.value)
    assert "rendezvous: rank 0 does not prove" in text
    assert "rank 1 gave up before rank 0 was connected" in text
    assert "set FASTDIST_SECRET or FASTDIST_SECRET_FILE to the same" in text


def test_a_rank_that_has_waited_long_enough_tells_those_that_come_later() -> None:
    store = dist.HashStore()
    first = StoreBoard(store, 1, 2, time.monotonic(), 0.01)
    with pytest.raises(ClusterConfigError, match=r"ranks \[0\] of 2 did not arrive within 0.01 s"):
        first.allgather("there")
    late = StoreBoard(store, 0, 2, time.monotonic() + 20, 20)
    with pytest.raises(ClusterConfigError, match=r"did not arrive .*rank 1 gave up"):
        late.allgather("there")


def test_the_first_rank_keeps_the_store_until_others_know_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("fastdist.collectives.rendezvous.store._TELL_S", 20.0)
    store = dist.HashStore()
    first, last = (StoreBoard(store, rank, 2, time.monotonic() + 20, 20) for rank in range(2))
    error = ClusterConfigError("ranks disagree")
    with ThreadPoolExecutor(2) as pool:
        assert [*pool.map(lambda one: one.allgather(1), (first, last))] == [[1, 1], [1, 1]]
        leaves = pool.submit(first.give_up, error)
        time.sleep(0.3)
        assert not leaves.done()
        begin = time.monotonic()
        last.give_up(error)
        leaves.result()
        assert time.monotonic() - begin < 10
