"""Functions on workers: scheduling, errors, lost workers."""

import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import fastdist as fd
import pytest
from fastdist.errors import FastdistError, UnavailableError
from launched import wait_until
from ps_cluster import PsCluster


@pytest.fixture(scope="module")
def cluster() -> Iterator[PsCluster]:
    cluster = PsCluster(workers=2, servers=1)
    yield cluster
    cluster.close()


@pytest.fixture
def coordinator(cluster: PsCluster) -> Any:
    return cluster.coordinator(cluster.strategy())


def test_results_may_nest(coordinator: Any) -> None:
    def make(i: int) -> dict[str, Any]:
        return {"square": i * i, "both": (i, [i])}

    values = {i: coordinator.schedule(make, (i,)) for i in range(5)}
    coordinator.join()
    assert coordinator.done()
    fetched = coordinator.fetch({"all": [values[i] for i in range(5)], "other": 7})
    assert fetched == {"all": [make(i) for i in range(5)], "other": 7}


def test_both_workers_work(coordinator: Any) -> None:
    def where() -> int:
        time.sleep(0.01)
        return fd.get_worker_index()

    values = [coordinator.schedule(where) for _ in range(20)]
    assert set(coordinator.fetch(values)) == {0, 1}
    with pytest.raises(FastdistError, match="schedules"):
        fd.get_worker_index()


def test_arguments(coordinator: Any) -> None:
    def join(*args: Any, **kwargs: Any) -> Any:
        return args, kwargs

    one = coordinator.schedule(join, (1,), {"a": 2})
    assert one.fetch() == ((1,), {"a": 2})
    two = coordinator.schedule(join, [one])
    assert two.fetch() == ((((1,), {"a": 2}),), {})
    with pytest.raises(ValueError, match="args must be a tuple or list, got int"):
        coordinator.schedule(join, 1)


def test_a_function_is_sent_once(coordinator: Any) -> None:
    class Counted:
        pickled = 0

        def __getstate__(self) -> dict[str, Any]:
            Counted.pickled += 1
            return {}

    counted = Counted()

    def use() -> bool:
        return counted is not None

    values = [coordinator.schedule(use) for _ in range(10)]
    assert coordinator.fetch(values) == [True] * 10
    assert Counted.pickled == 1


def test_unreferenced_functions_are_forgotten(coordinator: Any) -> None:
    for i in range(50):
        assert coordinator.schedule(lambda i=i: i).fetch() == i
    link = coordinator._dispatcher.links[0]
    wait_until(lambda: coordinator._dispatcher.wake() or len(link._known) < 10)


def test_the_first_error_is_raised_once(coordinator: Any) -> None:
    begun: list[Any] = []

    def fail(i: int) -> None:
        time.sleep(0.05)
        raise KeyError(f"number {i}")

    def work() -> int:
        time.sleep(0.05)
        return 1

    begun = [coordinator.schedule(fail, (i,)) for i in range(1)]
    waiting = [coordinator.schedule(work) for _ in range(50)]
    with pytest.raises(KeyError, match="number 0") as raised:
        coordinator.join()
    assert "in fail" in str(raised.value.__cause__)
    with pytest.raises(KeyError):
        begun[0].fetch()
    outcomes = [_outcome(value) for value in waiting]
    assert set(outcomes) <= {"1", "the function was cancelled before it began, because another one"}
    assert sum(outcome != "1" for outcome in outcomes) > 10
    coordinator.join()
    assert coordinator.done()
    assert coordinator.schedule(work).fetch() == 1


def _outcome(value: Any) -> str:
    try:
        return str(value.fetch())
    except FastdistError as error:
        return str(error).removesuffix(" raised an error")


@pytest.mark.parametrize("call", ["schedule", "done"])
def test_errors_are_raised_by(coordinator: Any, call: str) -> None:
    def fail() -> None:
        raise ValueError("oh")

    value = coordinator.schedule(fail)
    wait_until(value.is_done)
    with pytest.raises(ValueError, match="oh"):
        coordinator.schedule(os.getpid) if call == "schedule" else coordinator.done()
    assert coordinator.done()


def test_errors_that_cannot_be_pickled(coordinator: Any) -> None:
    def fail() -> None:
        class Odd(Exception):
            def __init__(self, one: int, two: int) -> None:
                super().__init__(f"odd {one} {two}")

        raise Odd(1, 2)

    coordinator.schedule(fail)
    with pytest.raises(FastdistError, match="Odd: odd 1 2"):
        coordinator.join()

    def lock() -> Any:
        return threading.Lock()

    coordinator.schedule(lock)
    with pytest.raises(TypeError, match="pickle"):
        coordinator.join()


def test_closing_ends_all_waits(cluster: PsCluster) -> None:
    coordinator = cluster.coordinator(cluster.strategy())
    values = [coordinator.schedule(time.sleep, (0.2,)) for _ in range(100)]
    coordinator._dispatcher.close(is_end=False)
    with pytest.raises(FastdistError, match="was closed"):
        values[-1].fetch(20)
    with pytest.raises(FastdistError, match="was closed"):
        coordinator.join()
    with pytest.raises(FastdistError, match="was closed"):
        coordinator.schedule(os.getpid)
    value = cluster.coordinator(cluster.strategy()).schedule(time.sleep, (5,))
    with pytest.raises(FastdistError, match="is no longer referenced"):
        value.fetch(20)


def test_arguments_of_coordinators(cluster: PsCluster) -> None:
    strategy = cluster.strategy()
    with pytest.raises(ValueError, match="seed must be from 0"):
        fd.ClusterCoordinator(strategy, seed=-1)
    with pytest.raises(TypeError, match="max_queued must be an integer"):
        fd.ClusterCoordinator(strategy, max_queued="many")
    with pytest.raises(TypeError, match="needs a ParameterServerStrategy, got DefaultStrategy"):
        fd.ClusterCoordinator(fd.DefaultStrategy())


@pytest.mark.slow
def test_forked_children_of_functions_do_not_serve(coordinator: Any) -> None:
    def fork() -> tuple[int, int]:
        parent = os.getpid()
        child = os.fork()
        return (parent, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])) if child else (0, 0)

    for _ in range(3):
        parent, code = coordinator.schedule(fork).fetch(30)
        assert parent > 0
        assert code == 0


@pytest.mark.slow
@pytest.mark.parametrize("raised", [SystemExit(3), GeneratorExit()])
def test_functions_do_not_end_workers(coordinator: Any, raised: BaseException) -> None:
    def fail() -> None:
        raise raised

    pids = [coordinator.schedule(os.getpid) for _ in range(20)]
    before = set(coordinator.fetch(pids))
    coordinator.schedule(fail)
    with pytest.raises(FastdistError, match=type(raised).__name__):
        coordinator.join()
    assert coordinator.schedule(os.getpid).fetch() in before


@pytest.mark.slow
def test_workers_end_on_sigterm(cluster: PsCluster) -> None:
    coordinator = cluster.coordinator(cluster.strategy())
    values = [coordinator.schedule(time.sleep, (0.5,)) for _ in range(4)]
    cluster.tasks["worker", 0].terminate()
    assert cluster.tasks["worker", 0].wait(20) == 0
    assert coordinator.fetch(values) == [None] * 4
    cluster.start("worker", 0)
    wait_until(lambda: coordinator.workers == [0, 1])


def test_the_coordinator_cannot_be_pickled(coordinator: Any) -> None:
    def inner() -> None:
        coordinator.join()

    with pytest.raises(TypeError, match="cannot be used in functions"):
        coordinator.schedule(inner)


def test_per_worker_datasets(coordinator: Any) -> None:
    def make() -> list[int]:
        return [10 * fd.get_worker_index() + i for i in range(1000)]

    data = coordinator.create_per_worker_dataset(make)
    numbers = iter(data)

    def take(numbers: Any) -> tuple[int, int]:
        time.sleep(0.002)
        return fd.get_worker_index(), next(numbers)

    taken = coordinator.fetch([coordinator.schedule(take, (numbers,)) for _ in range(20)])
    for worker in (0, 1):
        own = [value for index, value in taken if index == worker]
        assert own == [10 * worker + i for i in range(len(own))]
    assert coordinator.fetch(coordinator.schedule(len, (data,))) == 1000
    copied = coordinator.create_per_worker_dataset([1, 2])
    assert coordinator.fetch(coordinator.schedule(list, (copied,))) == [1, 2]
    with pytest.raises(FastdistError, match="pass it to a scheduled function"):
        next(numbers)

    def exhaust(numbers: Any) -> None:
        while True:
            next(numbers)

    coordinator.schedule(exhaust, (iter(copied),))
    with pytest.raises(FastdistError, match="on an exhausted iterator"):
        coordinator.join()


def test_per_worker_values(coordinator: Any) -> None:
    own = fd.PerWorkerValues(["zero", "one"])

    def mine(value: str) -> tuple[int, str]:
        time.sleep(0.01)
        return fd.get_worker_index(), value

    values = coordinator.fetch([coordinator.schedule(mine, (own,)) for _ in range(10)])
    assert set(values) == {(0, "zero"), (1, "one")}


def test_the_queue_is_bounded(cluster: PsCluster) -> None:
    coordinator = cluster.coordinator(cluster.strategy(), max_queued=4)
    most = 0

    def work() -> None:
        time.sleep(0.005)

    for _ in range(40):
        coordinator.schedule(work)
        most = max(most, len(coordinator._backlog))
    coordinator.join()
    assert most == 4


def test_killed_workers_lose_nothing(cluster: PsCluster) -> None:
    coordinator = cluster.coordinator(cluster.strategy())

    def work(i: int) -> int:
        time.sleep(0.01)
        return i

    first = coordinator.schedule(work, (-1,))
    assert first.fetch() == -1
    values = [coordinator.schedule(work, (i,)) for i in range(200)]
    for index in (0, 1):
        time.sleep(0.2)
        cluster.kill("worker", index)
        if index == 0:
            cluster.start("worker", 0)
            wait_until(lambda: len(coordinator.workers) == 2)
    cluster.start("worker", 1)
    coordinator.join()
    assert coordinator.fetch(values) == list(range(200))
    assert first.fetch() == -1
    wait_until(lambda: coordinator.workers == [0, 1])


def test_exact_evaluation_with_killed_workers(cluster: PsCluster) -> None:
    """Each piece of the data counts once, because each function's result does."""
    coordinator = cluster.coordinator(cluster.strategy())
    data = list(range(1000))

    def total(begin: int) -> int:
        time.sleep(0.01)
        return sum(data[begin : begin + 20])

    values = [coordinator.schedule(total, (begin,)) for begin in range(0, 1000, 20)]
    time.sleep(0.1)
    cluster.kill("worker", 1)
    cluster.start("worker", 1)
    assert sum(coordinator.fetch(values)) == sum(data)
    wait_until(lambda: coordinator.workers == [0, 1])


def test_waiting_runs_an_incomplete_group(cluster: PsCluster) -> None:
    coordinator = cluster.coordinator(cluster.strategy(synchronous=True))
    assert coordinator.schedule(os.getpid).fetch(30) > 0
    coordinator.schedule(os.getpid)
    wait_until(coordinator.done)
    values = [coordinator.schedule(os.getpid) for _ in range(3)]
    assert len(set(coordinator.fetch(values[:2], 30))) == 2
    coordinator.join()


@pytest.mark.slow
def test_the_latest_coordinator_gets_the_workers(
    cluster: PsCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = cluster.strategy(), cluster.strategy()
    with monkeypatch.context() as patch:
        patch.setenv("FASTDIST_RENDEZVOUS_TIMEOUT_S", "1")
        first = fd.ClusterCoordinator(one)
    wait_until(lambda: first.workers == [0, 1])
    second = cluster.coordinator(two)
    cluster.kill("worker", 0)
    cluster.start("worker", 0)
    wait_until(lambda: second.workers == [0, 1])
    assert second.schedule(os.getpid).fetch() > 0
    wait_until(lambda: first.workers == [])
    first.schedule(os.getpid)
    with pytest.raises(UnavailableError, match="it belongs to a coordinator that began later"):
        first.join()
    first.close()
    assert second.schedule(os.getpid).fetch() > 0
    assert second.strategy.client.stats(0)["uptime_s"] > 0
    assert all(task.poll() is None for task in cluster.tasks.values())


@pytest.mark.slow
def test_no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = PsCluster(workers=1, servers=1)
    try:
        cluster.kill("worker", 0)
        strategy = cluster.strategy()
        monkeypatch.setenv("FASTDIST_RENDEZVOUS_TIMEOUT_S", "2")
        coordinator = fd.ClusterCoordinator(strategy)
        coordinator.schedule(os.getpid)
        with pytest.raises(UnavailableError, match="no worker could be reached for 2 s: tcp"):
            coordinator.join()
        cluster.start("worker", 0)  # late
        wait_until(lambda: coordinator.workers == [0])
        assert coordinator.schedule(os.getpid).fetch() > 0
    finally:
        cluster.close()


def test_the_job_ends() -> None:
    cluster = PsCluster(workers=1, servers=1)
    try:
        with cluster.coordinator(cluster.strategy()) as coordinator:
            coordinator.schedule(os.getpid)
            coordinator.join()
        assert [task.wait(20) for task in cluster.tasks.values()] == [0, 0]
    finally:
        cluster.close()
