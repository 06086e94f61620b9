"""Servers that die, hang or restart, as clients see them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from fastdist.errors import UnavailableError
from fastdist.link.listener import Listener
from fastdist.ps import Client, DenseSpec, Item, RowsSpec, RuleSpec, Server
from fastdist.ps.client.checkpoint import restore_checkpoint, save_checkpoint
from fastdist.ps.client.partition import RoundRobin
from fastdist.ps.server import service
from fastdist.ps.wire.protocol import PART_SIZE, Op
from launched import wait_until
from sharded_things import ShardedRows, ShardedVariable, pull, push

SGD = RuleSpec("SGD", {"lr": 1.0})
SERVE = (
    "import sys; from fastdist.ps import Server; "
    "print(Server(sys.argv[1]).address, flush=True); sys.stdin.read()"
)


class Process:
    """A server in a process of its own."""

    def __init__(self, address: str = "tcp://127.0.0.1:*") -> None:
        pipe = subprocess.PIPE
        command = [sys.executable, "-c", SERVE, address]
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
        assert self.process.stdout is not None
        self.address = self.process.stdout.readline().strip()

    def stop(self) -> None:
        os.kill(self.process.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WNOWAIT)

    def go_on(self) -> None:
        os.kill(self.process.pid, signal.SIGCONT)

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def server() -> Iterator[Process]:
    made = Process()
    yield made
    made.end()


@pytest.mark.slow
def test_a_killed_server_is_noticed_soon(server: Process) -> None:
    with Server() as alive, Client([server.address, alive.address]) as client:
        w = client.create(0, DenseSpec("w", (2,), SGD), np.zeros(2))
        other = client.create(1, DenseSpec("w", (2,), SGD), np.zeros(2))
        server.stop()
        (ticket,) = client.begin_read([Item(0, w, np.zeros(2, np.float32))])
        server.end()
        for _ in range(2):  # a request in flight, and a later one
            begin = time.monotonic()
            with pytest.raises(UnavailableError, match=r"server 0 at .* is gone: the conn") as at:
                client.wait(ticket)
            assert 2 < time.monotonic() - begin < 5
            assert at.value.ranks == (0,)
            (ticket,) = client.begin_read([Item(0, w, np.zeros(2, np.float32))])
        push(client, 1, other, np.ones(2))
        again = Process(server.address)
        (ticket,) = client.begin_read([Item(0, w, np.zeros(2, np.float32))])  # the start takes time
        try:
            with pytest.raises(UnavailableError, match="was restarted"):
                client.wait(ticket)
            client.create(0, DenseSpec("w", (2,), SGD), np.ones(2))
        finally:
            again.end()


@pytest.mark.slow
def test_a_server_dies_in_the_middle_of_large_values(server: Process) -> None:
    """More parts than the window; afterwards the client works with the remaining servers."""
    size = 40 * PART_SIZE
    spec, pieces = DenseSpec("w", (size,), SGD), RoundRobin(1).place((size,), 4)
    with Client([server.address]) as client:
        variable = ShardedVariable(client, spec, pieces, np.zeros(size, np.float32))
        server.stop()
        threading.Timer(0.5, server.end).start()
        begin = time.monotonic()
        with pytest.raises(UnavailableError, match="is gone"):
            variable.pull()
        assert time.monotonic() - begin < 6
        assert not client._in_flight[0]
        again = Process(server.address)
        try:
            variable = ShardedVariable(client, spec, pieces, np.ones(size, np.float32))
            variable.push(np.ones(size, np.float32))
            assert (variable.pull() == 0).all()
        finally:
            again.end()


@pytest.mark.slow
def test_a_server_dies_while_it_saves(server: Process, tmp_path: Path) -> None:
    """The checkpoint before stays, and nothing of the new one."""
    with Client([server.address]) as client:
        spec = RowsSpec("rows", 64, SGD, 200_000)
        rows = ShardedRows(client, spec, RoundRobin(1).place((200_000, 64), 4))
        ids = np.arange(200_000)
        rows.push(ids, -np.ones((ids.size, 64), np.float32))
        save_checkpoint(client, tmp_path, [rows])
        before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
        rows.push(ids, -np.ones((ids.size, 64), np.float32))

        def kill_in_the_middle() -> None:
            wait_until(lambda: any(path not in before for path in tmp_path.rglob("part-*")))
            server.process.kill()

        killer = threading.Thread(target=kill_in_the_middle)
        killer.start()
        with pytest.raises(UnavailableError):
            save_checkpoint(client, tmp_path, [rows])
        killer.join()
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}.keys() == before.keys()
    with Server() as other, Client([other.address]) as client:
        rows = ShardedRows(client, spec, RoundRobin(1).place((200_000, 64), 4))
        restore_checkpoint(client, tmp_path, [rows])
        assert (rows.pull(ids[::1000]) == 1).all()


@pytest.mark.slow
def test_a_server_that_is_slow_is_waited_for(server: Process) -> None:
    with Client([server.address], grace_s=0.5) as client:
        w = client.create(0, DenseSpec("w", (2,), SGD), np.zeros(2))
        server.stop()
        (ticket,) = client.begin_change([Item(0, w, np.ones(2, np.float32))])
        time.sleep(5)
        server.go_on()
        client.wait(ticket)
        assert (pull(client, 0, w, (2,)) == -1).all()


@pytest.mark.slow
@pytest.mark.parametrize("address", ["ipc://{}/server", "tcp://127.0.0.1:*"])
def test_a_server_that_is_stopped_is_given_up(tmp_path: Path, address: str) -> None:
    """Nothing tells it from one that is overloaded."""
    server = Process(address.format(tmp_path))
    size = 4 * PART_SIZE
    try:
        with Client([server.address], timeout_s=2) as client:
            w = client.create(0, DenseSpec("w", (size,), SGD), np.zeros(size, np.float32))
            server.stop()
            begin = time.monotonic()
            with pytest.raises(UnavailableError, match=r"CHANGE for .* but the connection holds"):
                push(client, 0, w, np.ones(size, np.float32))
            with pytest.raises(UnavailableError, match=r"STATS for .* but the connection holds"):
                client.stats(0)
            assert time.monotonic() - begin < 10
            server.go_on()
            # What was given up may be applied, each part of it once.
            assert set(np.unique(pull(client, 0, w, (size,)))) <= {-1.0, 0.0}
            client.stats(0)
    finally:
        server.go_on()
        server.end()


def test_a_restart_within_the_grace_is_answered_at_once(server: Process) -> None:
    with Client([server.address], retry_s=20) as client:
        client.stats(0)
        server.stop()
        ticket = client.submit(0, Op.STATS)
        server.end()
        again = Process(server.address)
        begin = time.monotonic()
        try:
            client.wait(ticket)
            assert time.monotonic() - begin < 5
        finally:
            again.end()


@pytest.mark.slow
def test_a_server_that_cannot_go_on_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would live on and never answer, and nothing would start it again."""

    def fail(self: object, *_: object) -> None:
        raise MemoryError("no room")

    with Server() as server, Client([server.address], timeout_s=3) as client:
        number = client.create(0, DenseSpec("w", (5,), SGD), np.ones(5))
        monkeypatch.setattr(Listener, "send", fail)
        with pytest.raises(UnavailableError):
            pull(client, 0, number, (5,))
        assert server.ended.wait(5)
        assert isinstance(server.failure, MemoryError)


def test_a_worker_connects_while_a_checkpoint_is_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    may_end = threading.Event()
    monkeypatch.setattr(service, "save", lambda *_: may_end.wait(20) and {})
    with Server() as server, Client([server.address]) as client, Client([server.address]) as worker:
        pieces = RoundRobin(1).place((5,), 4)
        things = [
            ShardedVariable(client, DenseSpec(name, (5,), SGD), pieces, np.ones(5))
            for name in "abc"
        ]
        saving = threading.Thread(target=save_checkpoint, args=(client, tmp_path, things))
        saving.start()
        try:
            wait_until(lambda: server.stats()["requests"] >= 5)
            begin = time.monotonic()
            ShardedVariable(worker, DenseSpec("a", (5,), SGD), pieces)
            assert time.monotonic() - begin < 5
            assert saving.is_alive()
        finally:
            may_end.set()
            saving.join()
