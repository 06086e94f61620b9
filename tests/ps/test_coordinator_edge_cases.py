"""Edge cases of a coordinator: what cannot be pickled, stopped workers, clocks, many threads."""

import collections
import functools
import gc
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fastdist as fd
import pytest
from coordinator_job import PlainCluster, PlainJob, step
from fastdist.errors import FastdistError, UnavailableError
from fastdist.link import connections
from fastdist.ps.coordinator import RemoteValue, dispatcher
from fastdist.ps.coordinator.backlog import Call
from launched import wait_until
from raw_link import RawServer

Pair = collections.namedtuple("Pair", "first second")


@pytest.fixture(scope="module")
def cluster() -> Iterator[PlainCluster]:
    cluster = PlainCluster(workers=2)
    yield cluster
    cluster.close()


@pytest.fixture
def coordinator(cluster: PlainCluster) -> Any:
    return cluster.coordinator()


def holds_lock() -> Callable[[], Any]:
    inner = threading.Lock()

    def work() -> Any:
        return inner

    return work


LOCK = threading.Lock()


def uses_global() -> Any:
    return LOCK


uses_global.__module__ = "__main__"  # pickled with the objects that it uses


class Holder:
    def __init__(self) -> None:
        self.lock = threading.Lock()

    def work(self) -> None:
        pass


@pytest.mark.parametrize(
    ("fn", "args", "kwargs", "name"),
    [
        (holds_lock(), (), None, "holds_lock.<locals>.work .* 'inner', which it closes over"),
        (uses_global, (), None, "uses_global cannot be sent to workers: the global 'LOCK'"),
        (Holder().work, (), None, "Holder.work .* its object's 'lock'"),
        (functools.partial(print, 1, LOCK), (), None, "partial .* argument 1"),
        (functools.partial(print, end=LOCK), (), None, "partial .* argument 'end'"),
        (print, (1, [LOCK]), None, "argument 1"),
        (print, (1,), {"end": LOCK}, "argument 'end'"),
    ],
)
def test_unpicklable_parts_are_named(
    coordinator: Any, fn: Any, args: Any, kwargs: Any, name: str
) -> None:
    with pytest.raises(TypeError, match=f"{name}: cannot pickle '_thread.lock' object"):
        coordinator.schedule(fn, args, kwargs)
    coordinator.join()
    assert coordinator.schedule(divmod, (7, 2)).fetch(20) == (3, 1)


def test_unpicklable_datasets_are_named(coordinator: Any) -> None:
    with pytest.raises(TypeError, match="'inner', which it closes over: cannot pickle"):
        coordinator.create_per_worker_dataset(holds_lock())


def test_invalid_arguments(coordinator: Any) -> None:
    with pytest.raises(TypeError, match="fn must be callable, got int"):
        coordinator.schedule(5)
    with pytest.raises(TypeError, match="kwargs must be a dict, got list"):
        coordinator.schedule(print, (), [1])
    with pytest.raises(TypeError, match="names of kwargs must be str, got 1"):
        coordinator.schedule(print, (), {1: 2})
    coordinator.join()


@pytest.mark.parametrize("made", [threading.Lock, lambda: (i for i in [])])
def test_results_that_cannot_be_pickled(coordinator: Any, made: Any) -> None:
    value = coordinator.schedule(lambda: made())
    match = r"the function returned a (lock|generator) that cannot be pickled: cannot pickle"
    with pytest.raises(TypeError, match=match):
        value.fetch(20)
    with pytest.raises(TypeError, match=match):
        coordinator.join()
    assert coordinator.workers == [0, 1]


def test_errors_that_unpickle_to_another_type(coordinator: Any) -> None:
    def fail() -> None:
        class Odd(Exception):
            def __reduce__(self) -> tuple[type, tuple[()]]:
                return dict, ()

        raise Odd("of mine")

    coordinator.schedule(fail)
    with pytest.raises(FastdistError, match="Odd: of mine"):
        coordinator.join()


def test_errors_do_not_grow(coordinator: Any) -> None:
    value = coordinator.schedule(lambda: 1 / 0)

    def length() -> int:
        with pytest.raises(ZeroDivisionError) as raised:
            value.fetch(20)
        assert "in <lambda>" in str(raised.value.__cause__)
        return len(raised.traceback)

    assert length() == length()
    with pytest.raises(ZeroDivisionError):
        coordinator.join()


def test_a_failed_value_as_an_argument_is_the_error(coordinator: Any) -> None:
    failed = coordinator.schedule(lambda: [][1])
    with pytest.raises(IndexError):
        coordinator.schedule(print, (failed,))
    coordinator.join()  # raised the first error
    with pytest.raises(IndexError):
        coordinator.schedule(lambda: failed)
    assert coordinator.done()


def test_structures_of_values(coordinator: Any) -> None:
    five = coordinator.schedule(lambda: 5)
    own = fd.PerWorkerValues([Pair(five, 0), Pair(five, 1)])

    def see(given: Any) -> Any:
        return given, fd.get_worker_index()

    given = {"a": [five, (five, {"b": own})], "c": Pair(own, [own])}
    seen, index = coordinator.schedule(see, (given,)).fetch(20)
    mine = Pair(5, index)
    assert seen == {"a": [5, (5, {"b": mine})], "c": Pair(mine, [mine])}
    assert coordinator.fetch({"d": Pair(five, [five, "x"])}) == {"d": Pair(5, [5, "x"])}


def test_large_values(coordinator: Any) -> None:
    assert len(coordinator.schedule(bytes, (100_000_000,)).fetch(60)) == 100_000_000


class Watched(PlainJob):
    """Records whether two of its methods run at the same time."""

    inside = 0
    most = 0

    def _note(self) -> None:
        self.inside += 1
        self.most = max(self.most, self.inside)
        time.sleep(0.001)
        self.inside -= 1

    def before_calls(self) -> bytes:
        self._note()
        return super().before_calls()

    def after_calls(self) -> None:
        self._note()
        super().after_calls()


def test_several_threads(cluster: PlainCluster) -> None:
    job = Watched(cluster.addresses)
    coordinator = cluster.coordinator(job, max_queued=8)
    wrong: list[Any] = []

    def use(divisor: int) -> None:
        try:
            for i in range(60):
                value = coordinator.schedule(divmod, (i, divisor))
                if i % 7 == 0:
                    coordinator.join()
                    coordinator.done()
                if value.fetch(20) != divmod(i, divisor):
                    wrong.append((i, divisor))
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=use, args=(i + 1,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    coordinator.join()
    assert wrong == []
    assert job.most == 1
    steps = [asked for asked in job.asked if asked != "reports"]
    assert steps == ["before", "after"] * (len(steps) // 2)


@pytest.mark.slow
def test_long_functions_after_short_ones_are_shared(coordinator: Any) -> None:
    """Short functions are sent ahead; long ones must not wait behind others on one worker."""
    for _ in range(5):
        for _ in range(800):
            coordinator.schedule(fd.get_worker_index)
        coordinator.join()
        time.sleep(0.01)

        def work() -> int:
            time.sleep(0.05)
            return fd.get_worker_index()

        where = coordinator.fetch([coordinator.schedule(work) for _ in range(6)])
        assert max(collections.Counter(where).values()) <= 4  # each worker gets two at the start


def test_ended_functions_use_no_memory(coordinator: Any) -> None:
    def nothing() -> None:
        pass

    def kept() -> int:
        return sum(type(thing) in (Call, RemoteValue) for thing in gc.get_objects())

    before = kept()
    for _ in range(3000):
        coordinator.schedule(nothing)
    coordinator.join()
    wait_until(lambda: kept() <= before)


def test_stopped_workers_come_back(cluster: PlainCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "_SILENT_S", 0.5)
    monkeypatch.setattr(connections, "_BEAT_S", 0.1)
    monkeypatch.setattr(connections, "_POLL_S", 0.1)
    coordinator = cluster.coordinator()

    def work(i: int) -> int:
        time.sleep(0.01)
        return i

    values = [coordinator.schedule(work, (i,)) for i in range(50)]
    values[4].fetch(20)
    cluster.tasks[0].send_signal(signal.SIGSTOP)
    try:
        assert coordinator.fetch(values, 20) == list(range(50))
        wait_until(lambda: coordinator.workers == [1])
    finally:
        cluster.tasks[0].send_signal(signal.SIGCONT)
    wait_until(lambda: coordinator.workers == [0, 1])
    pids = coordinator.fetch([coordinator.schedule(os.getpid) for _ in range(20)], 20)
    assert set(pids) == {task.pid for task in cluster.tasks.values()}


def test_a_worker_that_holds_the_gil_is_not_lost(
    cluster: PlainCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "_SILENT_S", 0.5)
    monkeypatch.setattr(connections, "_BEAT_S", 0.1)
    monkeypatch.setattr(connections, "_POLL_S", 0.1)
    coordinator = cluster.coordinator()

    def hold() -> int:
        import ctypes

        ctypes.PyDLL(None).usleep(1_500_000)
        return os.getpid()

    before = {task.pid for task in cluster.tasks.values()}
    held = [coordinator.schedule(hold) for _ in range(2)]
    deadline = time.monotonic() + 1.2
    while time.monotonic() < deadline:
        assert coordinator.workers == [0, 1]
        time.sleep(0.05)
    assert set(coordinator.fetch(held, 20)) == before


@pytest.mark.slow
def test_a_busy_worker_may_take_large_arguments_later(cluster: PlainCluster) -> None:
    """Later than a machine may take nothing before it counts as gone."""
    coordinator = cluster.coordinator(PlainJob(cluster.addresses[:1]))
    ran = [coordinator.schedule(lambda: time.sleep(13) or os.getpid())]
    ran += [coordinator.schedule(lambda data: len(data), (bytes(30_000_000),)) for _ in range(2)]
    assert coordinator.fetch(ran, 60) == [cluster.tasks[0].pid, 30_000_000, 30_000_000]


def test_a_clock_that_was_ahead(cluster: PlainCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chief that is started again gets the workers although its clock is behind the first's."""
    hour = 3600 * 10**9
    now = time.time_ns
    with monkeypatch.context() as ahead:
        ahead.setattr(time, "time_ns", lambda: now() + hour)
        first = fd.ClusterCoordinator(PlainJob(cluster.addresses))
    assert len(first.fetch([first.schedule(os.getpid) for _ in range(4)], 20)) == 4
    second = fd.ClusterCoordinator(PlainJob(cluster.addresses))
    links = second._dispatcher.links
    wait_until(lambda: any(link.is_replaced for link in links))  # while the first is there
    assert first.schedule(os.getpid).fetch(20) > 0
    first._dispatcher.close(is_end=False)
    assert len(second.fetch([second.schedule(os.getpid) for _ in range(4)], 20)) == 4
    wait_until(lambda: second.workers == [0, 1] and not any(link.is_replaced for link in links))


@pytest.mark.slow
def test_workers_that_answer_wrongly_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their connections are made anew, all at once, again and again."""
    with RawServer() as other:
        monkeypatch.setenv("FASTDIST_SECRET", "the secret of others")
        job = PlainJob([other.address] * 20)
        coordinator = fd.ClusterCoordinator(job)
        late = coordinator.schedule(os.getpid)
        time.sleep(2.5)
        assert not late.is_done()
        coordinator.close()


def test_many_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    addresses = [f"tcp://127.0.0.1:{1 + i}" for i in range(800)]
    fd.ClusterCoordinator(PlainJob(addresses)).close()
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 1024))
    with pytest.raises(OSError, match="800 workers need about 1700 open files, the limit is 1024"):
        fd.ClusterCoordinator(PlainJob(addresses))


def test_iterators_restart_with_their_worker(cluster: PlainCluster) -> None:
    coordinator = cluster.coordinator(PlainJob(cluster.addresses[:1]))
    numbers = iter(coordinator.create_per_worker_dataset(lambda: range(3)))
    taken = [coordinator.schedule(next, (numbers,)) for _ in range(2)]
    assert coordinator.fetch(taken, 20) == [0, 1]
    cluster.kill(0)
    late = [coordinator.schedule(next, (numbers,)) for _ in range(4)]
    cluster.start(0)
    assert coordinator.fetch(late[:3], 20) == [0, 1, 2]
    with pytest.raises(FastdistError, match="on an exhausted iterator"):
        coordinator.join()
    again = iter(coordinator.create_per_worker_dataset(lambda: range(3)))
    assert coordinator.schedule(next, (again,)).fetch(20) == 0


def test_a_function_that_crashes_every_worker_is_given_up(
    cluster: PlainCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatcher, "MAX_LOST_WORKERS", 3)
    coordinator = cluster.coordinator()
    stop = threading.Event()

    def keep_alive() -> None:
        while not stop.is_set():
            for index, task in list(cluster.tasks.items()):
                if task.poll() is not None:
                    cluster.start(index)
            time.sleep(0.02)

    keeper = threading.Thread(target=keep_alive)
    keeper.start()
    try:
        coordinator.schedule(os._exit, (9,))
        with pytest.raises(UnavailableError, match="3 workers were lost while they ran this"):
            coordinator.join()
        wait_until(lambda: coordinator.workers == [0, 1])
    finally:
        stop.set()
        keeper.join()
    assert coordinator.schedule(os.getpid).fetch(20) > 0


def test_forked_children_do_not_end_the_job(cluster: PlainCluster) -> None:
    job = PlainJob(cluster.addresses)
    coordinator = cluster.coordinator(job)
    child = os.fork()
    if child == 0:
        try:
            coordinator.close()
        finally:
            os._exit(len(job.asked))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert coordinator.schedule(divmod, (7, 2)).fetch(20) == (3, 1)


CHIEF = """
import sys, threading, time
from coordinator_job import PlainJob, fd
from launched import wait_until
coordinator = fd.ClusterCoordinator(PlainJob({addresses!r}))
wait_until(lambda: len(coordinator.workers) == 2)
values = [coordinator.schedule(time.sleep, (0.2,)) for _ in range({count})]
print("begun", flush=True)
{then}
"""


@pytest.mark.parametrize(
    ("count", "then", "code", "said"),
    [
        pytest.param(100, "", 0, "", marks=pytest.mark.slow),
        pytest.param(
            *(100, "coordinator.join()", -signal.SIGINT, "KeyboardInterrupt"),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            *(4, "threading.Thread(target=coordinator.join).start()", 0, ""),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["queued", "interrupted", "thread"],
)
def test_chiefs_that_end(count: int, then: str, code: int, said: str) -> None:
    """Workers end too, and do not begin queued functions."""
    cluster = PlainCluster(workers=2)
    try:
        with subprocess.Popen(
            [
                sys.executable,
                "-c",
                CHIEF.format(addresses=cluster.addresses, count=count, then=then),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as chief:
            assert chief.stdout is not None
            assert chief.stdout.readline() == "begun\n"
            if code == -signal.SIGINT:
                time.sleep(0.1)
                chief.send_signal(signal.SIGINT)
            _, errors = chief.communicate(timeout=20)
        assert chief.returncode == code
        assert errors.strip().endswith(said)
        assert said or errors == ""
        assert [task.wait(20) for task in cluster.tasks.values()] == [0, 0]
    finally:
        cluster.close()


@pytest.mark.slow
def test_nothing_begins_when_the_job_ends(tmp_path: Path) -> None:
    cluster = PlainCluster(workers=1)

    def work(i: int) -> None:
        (tmp_path / str(i)).touch()
        time.sleep(2)

    try:
        with cluster.coordinator() as coordinator:
            for i in range(2):
                coordinator.schedule(work, (i,))
            wait_until((tmp_path / "0").exists)
        assert cluster.tasks[0].wait(20) == 0
        assert not (tmp_path / "1").exists()
    finally:
        cluster.close()


def test_workers_end_amid_a_step() -> None:
    """The job ends while a worker waits for another in the same step."""
    cluster = PlainCluster(workers=2)
    try:
        job = PlainJob(cluster.addresses)
        job.synchronous = True
        with cluster.coordinator(job) as coordinator:
            for i in range(2):
                coordinator.schedule(lambda i: step() if i else time.sleep(0.3), (i,))
            coordinator._backlog.wait_for(lambda: False, 0.1)
        assert [task.wait(20) for task in cluster.tasks.values()] == [0, 0]
    finally:
        cluster.close()
