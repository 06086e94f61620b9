"""Unexpected messages, and results of lost workers."""

import os
import pickle
import signal
import socket
import socketserver
import struct
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import fastdist as fd
import pytest
from coordinator_job import (
    Impostor,
    PlainCluster,
    PlainJob,
    count_reconnections,
    impostor,
    step,
)
from fastdist.errors import FastdistError, UnavailableError
from fastdist.ps.coordinator.messages import (
    CALL,
    TO_COORDINATOR,
    TO_WORKER,
    Kind,
    Outcome,
    pack,
)
from launched import wait_until


@pytest.fixture(scope="module")
def cluster() -> Iterator[PlainCluster]:
    cluster = PlainCluster(workers=2)
    yield cluster
    cluster.close()


def garbled(kinds: Any) -> Iterator[tuple[bytes, ...]]:
    """Yield messages of each kind with too few, too many, too short and too long frames."""
    for kind in kinds:
        frames = [bytes(size or 0) for size in kind.sizes]
        yield pack(kind), *frames, b"more"
        if frames:
            yield pack(kind), *frames[1:]
        for place, size in enumerate(kind.sizes):
            if size is not None:
                for wrong in (b"", bytes(size - 1), bytes(size + 1), bytes(1 << 20)):
                    yield pack(kind), *frames[:place], wrong, *frames[place + 1 :]
        yield pack(kind)[:-1], *frames
        yield pack(kind) + b"x", *frames
        yield b"FDCO\x02\x00" + pack(kind)[6:], *frames
    for other in (0, 15, 65535, *(set(Kind) - set(kinds))):
        yield (struct.pack("<4sHHQ", b"FDCO", 1, other, 0),)
    yield (b"",)
    yield b"", b""
    yield (os.urandom(16),)
    yield (bytes(1 << 20),)


def call(impostor: Impostor, number: int, arguments: bytes) -> tuple[Outcome, bytes]:
    impostor.send(pack(Kind.CALL, number), CALL.pack(1, number, 1, False), arguments, b"")
    done, (outcome, content, _) = impostor.receive_until(Kind.RESULT)
    assert done == number
    return Outcome(outcome[0]), content


def test_workers_reject_malformed_messages(cluster: PlainCluster) -> None:
    """From a stranger with the job's keys, and from the worker's coordinator."""
    before = cluster.tasks[0].pid
    began = time.time_ns()
    with impostor(cluster.addresses[0]) as known:
        known.take_over(began)
        known.send(pack(Kind.DEFINE, 1), cloudpickle.dumps(lambda: os.getpid))
        with impostor(cluster.addresses[0]) as stranger:
            for number, sender in enumerate((stranger, known)):
                messages = list(garbled(TO_WORKER))
                for message in messages:
                    sender.send(*message)
                refusals = [sender.receive_until(Kind.REJECTED)[1][0] for _ in messages]
                assert b"a message of version 2, expected 1" in b"".join(refusals)
                assert b"a HELLO with frames of [15, 20] bytes, expected [16, 20]" in refusals
                outcome, content = call(known, number, cloudpickle.dumps(((), {})))
                assert (outcome, pickle.loads(content)) == (Outcome.RETURNED, before)


def test_workers_survive_malformed_pickles(cluster: PlainCluster) -> None:
    with impostor(cluster.addresses[0]) as known:
        known.take_over(time.time_ns())
        outcome, content = call(known, 1, cloudpickle.dumps(((), {})))
        assert outcome is Outcome.RAISED
        assert "this worker has not received definition 1" in str(pickle.loads(content)[0])
        known.send(pack(Kind.DEFINE, 1), b"no pickle")
        assert call(known, 2, cloudpickle.dumps(((), {})))[0] is Outcome.RAISED
        known.send(pack(Kind.FORGET, 1))
        known.send(pack(Kind.DEFINE, 1), cloudpickle.dumps(lambda: os.getpid))
        for arguments in (b"", b"no pickle", cloudpickle.dumps(7), cloudpickle.dumps((1, 2))):
            assert call(known, 3, arguments)[0] is Outcome.RAISED
        assert call(known, 4, cloudpickle.dumps(((), {})))[0] is Outcome.RETURNED


def test_a_worker_is_told_of_a_new_connection(cluster: PlainCluster) -> None:
    """Calls that it had received are dropped: it must not count on their coming."""
    job, began = os.urandom(16), time.time_ns()
    for turn in range(3):
        with impostor(cluster.addresses[0]) as known:
            known.take_over(began, job=job)
            known.send(pack(Kind.DEFINE, 1), cloudpickle.dumps(lambda: count_reconnections))
            outcome, content = call(known, 1, cloudpickle.dumps(((), {})))
            assert (outcome, pickle.loads(content)) == (Outcome.RETURNED, turn)


def test_strangers_cannot_end_a_step(cluster: PlainCluster) -> None:
    with (
        impostor(cluster.addresses[0]) as known,
        impostor(cluster.addresses[0]) as stranger,
    ):
        known.take_over(time.time_ns())
        known.send(pack(Kind.DEFINE, 1), cloudpickle.dumps(lambda: step))
        about = CALL.pack(1, 1, 2, False)
        known.send(pack(Kind.CALL, 1), about, cloudpickle.dumps(((), {})), b"")
        known.receive_until(Kind.STAGED)
        for message in garbled(TO_WORKER):
            stranger.send(*message)
        stranger.send(pack(Kind.ABORT, 1))
        stranger.send(pack(Kind.RESUME, 1), b"")
        known.send(pack(Kind.COMMIT, 1), struct.pack("<d", 7.0))
        assert known.receive_until(Kind.COMMITTED)[1] == [b""]
        known.send(pack(Kind.RESUME, 1), b"")
        assert pickle.loads(known.receive_until(Kind.RESULT)[1][1]) == 7.0


def unreadable() -> Iterator[tuple[bytes, ...]]:
    yield from garbled(TO_COORDINATOR)
    yield pack(Kind.RESULT, 1), b"\x09", b"", b""
    yield pack(Kind.REJECTED), b"\xff what?"


def test_coordinators_reject_malformed_messages(
    cluster: PlainCluster, caplog: pytest.LogCaptureFixture
) -> None:
    """The worker that sent it gets no functions; other workers run them."""
    with impostor() as fake:
        for message in unreadable():
            caplog.clear()
            job = PlainJob([fake.address, cluster.addresses[0]])
            coordinator = fd.ClusterCoordinator(job)
            fake.be_ready()
            wait_until(lambda known=coordinator: known.workers == [0, 1])
            values = [coordinator.schedule(divmod, (i, 2)) for i in range(4)]
            fake.receive_until(Kind.CALL)
            fake.send(*message)
            assert coordinator.fetch(values, 20) == [divmod(i, 2) for i in range(4)]
            assert coordinator.workers == [1]
            assert f"{fake.address} is not used" in caplog.text


class Exits:
    def __reduce__(self) -> tuple[Any, tuple[int]]:
        return sys.exit, (3,)


def test_errors_and_results_that_cannot_be_unpickled(cluster: PlainCluster) -> None:
    with impostor() as fake:
        coordinator = fd.ClusterCoordinator(PlainJob([fake.address]))
        fake.be_ready()
        contents = [pickle.dumps(made) for made in (1, (1, 2), (KeyboardInterrupt(), ""), Exits())]
        for content in (b"", b"no pickle", *contents):
            value = coordinator.schedule(os.getpid)
            number, _ = fake.receive_until(Kind.CALL)
            fake.send(pack(Kind.RESULT, number), bytes([Outcome.RAISED]), content, b"")
            with pytest.raises(FastdistError, match="a worker's error cannot be unpickled here"):
                value.fetch(20)
            with pytest.raises(FastdistError, match="a worker's error cannot be unpickled here"):
                coordinator.join()
        value = coordinator.schedule(os.getpid)
        number, _ = fake.receive_until(Kind.CALL)
        fake.send(pack(Kind.RESULT, number), bytes([Outcome.RETURNED]), b"no pickle", b"")
        for _ in range(2):
            with pytest.raises(FastdistError, match="result cannot be unpickled here"):
                value.fetch(20)
        coordinator.join()


def test_malformed_state_updates(cluster: PlainCluster) -> None:
    with impostor() as fake:
        job = PlainJob([fake.address])
        coordinator = fd.ClusterCoordinator(job)
        fake.be_ready()
        for state_update in (b"no pickle", pickle.dumps("new")):
            coordinator.schedule(os.getpid)
            number, _ = fake.receive_until(Kind.CALL)
            fake.send(pack(Kind.RESULT, number), bytes(1), pickle.dumps(7), state_update)
            if state_update == b"no pickle":
                with pytest.raises(FastdistError, match="a worker's state update cannot be read"):
                    coordinator.join()
        coordinator.join()
        assert job.asked[-3:] == ["reports", "new", "after"]


def test_a_leader_that_ends_is_not_waited_for(cluster: PlainCluster) -> None:
    with impostor() as first, impostor() as second:
        job = PlainJob([first.address, second.address])
        job.synchronous = True
        coordinator = fd.ClusterCoordinator(job)
        for fake in (first, second):
            fake.be_ready()
        wait_until(lambda: coordinator.workers == [0, 1])
        values = [coordinator.schedule(os.getpid) for _ in range(2)]
        numbers = [fake.receive_until(Kind.CALL)[0] for fake in (first, second)]
        for fake, number in zip((first, second), numbers, strict=True):
            fake.send(pack(Kind.STAGED, number), struct.pack("<d", 1.0))
            if fake is first:
                wait_until(lambda: coordinator._dispatcher._group._weights)
        assert first.receive_until(Kind.COMMIT)[0] == numbers[0]
        first.send(pack(Kind.RESULT, numbers[0]), bytes(1), pickle.dumps(1), b"")
        assert second.receive_until(Kind.RESUME) == (
            numbers[1],
            [b"its function ended without committing the step"],
        )
        second.send(pack(Kind.RESULT, numbers[1]), bytes(1), pickle.dumps(2), b"")
        assert coordinator.fetch(values, 20) == [1, 2]


def test_noise_on_the_port(cluster: PlainCluster) -> None:
    """A sender without keys neither ends the job nor goes unnoticed."""
    host, port = cluster.addresses[0].removeprefix("tcp://").split(":")
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x01CURVE" + bytes(47)
    noises = [
        b"",
        b"GET / HTTP/1.0\r\n\r\n",
        greeting[:20],
        greeting + b"\x06" + b"\xff" * 8,
        greeting + b"\x04\xc8\x05HELLO" + os.urandom(194),
        greeting.replace(b"CURVE", b"NULL\0") + b"\x04\x06\x05READY",
        *map(os.urandom, range(1, 400, 20)),
    ]
    connections = []
    for noise in noises:
        connection = socket.create_connection((host, int(port)))
        connection.sendall(noise)
        connections.append(connection)
    coordinator = cluster.coordinator()
    values = [coordinator.schedule(os.getpid) for _ in range(20)]
    assert set(coordinator.fetch(values, 20)) == {task.pid for task in cluster.tasks.values()}
    for connection in connections:
        connection.close()


def test_other_versions_are_named(cluster: PlainCluster, monkeypatch: Any) -> None:
    monkeypatch.setenv("FASTDIST_RENDEZVOUS_TIMEOUT_S", "0.5")
    with impostor() as fake:
        coordinator = fd.ClusterCoordinator(PlainJob([fake.address]))
        fake.receive_until(Kind.HELLO)
        fake.send(b"FDCO\x02\x00" + pack(Kind.REJECTED)[6:], b"a message of version 1, expected 2")
        wait_until(lambda: coordinator._dispatcher.links[0].last_error != "no answer")
        coordinator.schedule(os.getpid)
        with pytest.raises(UnavailableError, match="a message of version 2, expected 1"):
            coordinator.join()


def test_another_secret_is_named(cluster: PlainCluster, monkeypatch: Any) -> None:
    monkeypatch.setenv("FASTDIST_RENDEZVOUS_TIMEOUT_S", "0.5")
    monkeypatch.setenv("FASTDIST_SECRET", "the secret of others")
    coordinator = fd.ClusterCoordinator(PlainJob(cluster.addresses))
    links = coordinator._dispatcher.links
    wait_until(lambda: all(link.last_error != "no answer" for link in links))
    coordinator.schedule(os.getpid)
    with pytest.raises(UnavailableError, match="it has another secret, or is not a fastdist"):
        coordinator.join()


@pytest.mark.slow
def test_a_worker_may_appear_on_a_foreign_port(cluster: PlainCluster, monkeypatch: Any) -> None:
    monkeypatch.setenv("FASTDIST_RENDEZVOUS_TIMEOUT_S", "0.5")
    host, port = cluster.addresses[1].removeprefix("tcp://").split(":")
    cluster.kill(1)

    class Foreign(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            self.request.sendall(b"HTTP/1.0 400 Bad request\r\n\r\n" + bytes(100))
            self.request.recv(1 << 16)

    class Server(socketserver.ThreadingTCPServer):  # coordinators of earlier tests connect too
        allow_reuse_address = daemon_threads = True

    with Server((host, int(port)), Foreign) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,)).start()
        coordinator = fd.ClusterCoordinator(PlainJob(cluster.addresses[1:]))
        wait_until(lambda: coordinator._dispatcher.links[0].last_error != "no answer")
        coordinator.schedule(os.getpid)
        with pytest.raises(UnavailableError, match="or is not a fastdist worker"):
            coordinator.join()
        server.shutdown()
    cluster.start(1)
    wait_until(lambda: coordinator.workers == [0])
    assert coordinator.schedule(os.getpid).fetch(20) == cluster.tasks[1].pid


def test_results_of_a_lost_worker_count(cluster: PlainCluster, tmp_path: Path) -> None:
    coordinator = cluster.coordinator(PlainJob(cluster.addresses[:1]))
    runs = tmp_path / "runs"

    def work() -> int:
        with runs.open("a") as file:
            file.write("x")
        time.sleep(0.1)
        threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGKILL)).start()
        return 7

    value = coordinator.schedule(work)
    wait_until(runs.exists)
    with (
        coordinator._backlog.changed
    ):  # when the dispatcher continues, it handles all events at once
        coordinator._dispatcher.wake()
        cluster.tasks[0].wait(20)
        time.sleep(0.2)
    cluster.start(0)
    assert value.fetch(20) == 7
    assert runs.read_text() == "x"
