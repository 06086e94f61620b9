"""Servers and clients: objects, changes that are applied once, and harmful input."""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import random
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fastdist.errors import FastdistError, UnavailableError
from fastdist.ps import Client, DenseSpec, Item, RowsSpec, RuleSpec, Server
from fastdist.ps.client.items import names_of
from fastdist.ps.server.changes import MAX_REQUESTS, Deduplicator
from fastdist.ps.wire.protocol import HEADER_BYTES, VERSION, Header, Op, Status
from fastdist.ps.wire.specs import from_json, to_json
from hypothesis import given
from hypothesis import strategies as st
from launched import wait_until
from raw_link import RawClient, RawServer
from sharded_things import pull, pull_rows, push, push_rows
from unreliable import Unreliable

SGD = RuleSpec("SGD", {"lr": 1.0})
ROWS = RowsSpec("rows", 4, SGD)


@pytest.fixture
def server() -> Iterator[Server]:
    with Server("tcp://127.0.0.1:*") as made:
        yield made


@pytest.fixture
def client(server: Server) -> Iterator[Client]:
    with Client([server.address], timeout_s=10) as made:
        yield made


def assign(client: Client, item: Item) -> None:
    for ticket in client.begin_change([item], op=Op.ASSIGN):
        client.wait(ticket)


@pytest.mark.parametrize("address", [None, "tcp://127.0.0.1:*"], ids=["path", "tcp"])
def test_variables_and_rows(address: str | None) -> None:
    with Server(address) as one, Server(address) as two:
        addresses = [one.address, two.address]
        with Client(addresses) as client:
            for server in (0, 1):
                initial = np.arange(6, dtype=np.float32).reshape(2, 3) + server
                dense = client.create(server, DenseSpec("w", (2, 3), SGD), initial)
                assert client.create(server, DenseSpec("w", (2, 3), SGD)) == dense
                assert (pull(client, server, dense, (2, 3)) == initial).all()
                push(client, server, dense, np.ones((2, 3)))
                push(client, server, dense, np.ones((2, 3)), lr=0.5)
                assert (pull(client, server, dense, (2, 3)) == initial - 1.5).all()
                assign(client, Item(server, dense, np.zeros(6, np.float32)))
                assert (pull(client, server, dense, (2, 3)) == 0).all()

                rows = client.create(server, ROWS)
                ids = [2**63 - 1, -5, 2**40]
                assert (pull_rows(client, server, rows, ids, 4) == 0).all()
                values = np.arange(12, dtype=np.float32).reshape(3, 4)
                assign(client, Item(server, rows, values, np.array(ids)))
                push_rows(client, server, rows, [ids[0], ids[0], ids[2]], np.ones((3, 4)))
                expected = values - np.array([[2], [0], [1]])
                assert (pull_rows(client, server, rows, ids, 4) == expected).all()
                assert pull_rows(client, server, rows, np.zeros(0, np.int64), 4).shape == (0, 4)
                stats = client.stats(server)["objects"]
                assert [entry["name"] for entry in stats] == ["w", "rows"]
                assert stats[1]["rows"] == 3
                assert len(client.stats(server)["objects"]) == 2


@pytest.mark.parametrize(("clients", "pushes"), [(6, 40), (40, 6)])
def test_many_clients_at_once(server: Server, clients: int, pushes: int) -> None:
    """Every push counts once, and no thread reads half of a push."""
    ids = np.arange(500)

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        with Client([server.address]) as client:
            rows = client.create(0, ROWS)
            tickets = []
            for _ in range(pushes):
                push_rows(client, 0, rows, rng.permutation(ids), -np.ones((500, 4)))
                values = np.empty((500, 4), np.float32)
                (ticket,) = client.begin_read([Item(0, rows, values, ids)])
                tickets.append((ticket, values))
            for ticket, values in tickets:
                client.wait(ticket)
                assert (values == values[:, :1]).all()

    threads = [CheckedThread(work, seed) for seed in range(clients)]
    for thread in threads:
        thread.finish()
    with Client([server.address]) as client:
        assert (pull_rows(client, 0, client.create(0, ROWS), ids, 4) == clients * pushes).all()


class CheckedThread(threading.Thread):
    """Raises the error of the thread in `finish`."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        super().__init__(daemon=True)
        self._call = lambda: function(*args)
        self._error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self._call()
        except BaseException as error:
            self._error = error

    def finish(self) -> None:
        self.join(60)
        assert not self.is_alive()
        if self._error is not None:
            raise self._error


# --- applied once -------------------------------------------------------------------------------


def one_row(table: int, id_: int) -> Item:
    return Item(0, table, np.ones((1, 4), np.float32), np.array([id_]))


def test_a_repeated_push_is_applied_once(server: Server, client: Client) -> None:
    rows = client.create(0, ROWS)
    frames = [names_of([one_row(rows, 7)]), np.ones((1, 4), np.float32)]
    with RawClient(server.address) as plain:
        for number in (1, 1, 2, 1, 2, 2):
            header = Header(Op.CHANGE, number, b"c" * 16, rows, floor=1)
            plain.send(header.pack(), *frames)
            assert Header.unpack(plain.receive()[0]).number == number
        late = Header(Op.CHANGE, 3, b"c" * 16, rows, floor=3)
        plain.send(late.pack(), *frames)
        plain.receive()
        forgotten = Header(Op.CHANGE, 2, b"c" * 16, rows, floor=1)
        plain.send(forgotten.pack(), *frames)
        plain.receive()
    assert (pull_rows(client, 0, rows, [7], 4) == -3).all()
    assert server.stats()["repeated"] == 5


@pytest.mark.slow
def test_nothing_is_lost_or_doubled_when_connections_break(server: Server) -> None:
    way = Unreliable(server.address, (10_000, 40_000), (5_000, 20_000))
    with Client([way.address], retry_s=0.1, timeout_s=50, window=8) as client:
        rows = client.create(0, ROWS)
        ids, gradients = np.arange(100), -np.ones((100, 4), np.float32)
        items = [Item(0, rows, gradients, ids) for _ in range(300)]
        for tickets in [client.begin_change([item]) for item in items]:
            client.wait(tickets[0])
        assert (pull_rows(client, 0, rows, ids, 4) == 300).all()
    way.close()
    assert way.broken > 10
    assert server.stats()["repeated"] > 0


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=60))
def test_applied_once_in_any_order(calls: list[tuple[int, bool]]) -> None:
    applied, done = Deduplicator(), set[int]()
    floor = 0
    for number, succeeds in calls:
        begun = applied.begin(b"c", number, floor)
        if number < floor or number in done:
            assert begun == (False, b"" if number < floor else b"reply")
            continue
        assert begun == (True, None)
        assert applied.begin(b"c", number, floor) == (False, None)
        applied.end(b"c", number, b"reply" if succeeds else None)
        if succeeds:
            done.add(number)
            floor = min(n for n in range(5) if n not in done)


def test_a_client_that_never_takes_replies() -> None:
    applied = Deduplicator()
    for number in range(MAX_REQUESTS):
        assert applied.begin(b"c", number, 0) == (True, None)
    with pytest.raises(ValueError, match="too many unanswered changes"):
        applied.begin(b"c", MAX_REQUESTS, 0)
    assert applied.begin(b"d", 0, 0) == (True, None)


# --- lost servers -----------------------------------------------------------------


def test_a_server_that_is_lost_and_comes_back() -> None:
    server = Server("tcp://127.0.0.1:*")
    with Client([server.address], timeout_s=1.5, grace_s=60, retry_s=0.2) as client:
        dense = client.create(0, DenseSpec("w", (2,), SGD), np.zeros(2))
        server.close()
        begin = time.monotonic()
        with pytest.raises(
            UnavailableError, match=r"has not answered CHANGE for .*connection is broken"
        ):
            push(client, 0, dense, np.ones(2))
        assert time.monotonic() - begin < 20
        ticket = client.submit(0, Op.STATS, timeout_s=20)
        with Server(server.address):
            assert b"objects" in bytes(client.wait(ticket))
            again = client.create(0, DenseSpec("w", (2,), SGD), np.zeros(2))
            for _ in range(2):
                with pytest.raises(UnavailableError, match="was restarted") as caught:
                    pull(client, 0, dense, (2,))
                assert caught.value.ranks == (0,)
            assert (pull(client, 0, again, (2,)) == 0).all()


def test_a_late_reply_is_accepted(server: Server) -> None:
    with Client([server.address], timeout_s=0.3, retry_s=0.1) as client:
        client.stats(0)
        ticket = client.submit(0, Op.STATS)
        wait_until(lambda: server.stats()["requests"] == 2)
        time.sleep(0.6)
        assert b"objects" in bytes(client.wait(ticket))


def test_a_connection_that_a_proxy_has_forgotten_is_made_anew(server: Server) -> None:
    without_end = (1 << 40, 1 << 41)
    way = Unreliable(server.address, without_end, without_end)
    with Client([way.address], timeout_s=2) as client:
        client.stats(0)
        tickets = [client.submit(0, Op.STATS) for _ in range(3)]
        client.wait(tickets[-1])
        way.forgets += 1  # both ends think that the connection holds
        begin = time.monotonic()
        for _ in range(3):
            client.stats(0)
        assert 0.9 < time.monotonic() - begin < 1.9
    way.close()


def test_the_window_limits_requests_in_flight(server: Server) -> None:
    with Client([server.address], window=4) as client:
        tickets = [client.submit(0, Op.STATS) for _ in range(50)]
        assert sum(not ticket.is_done for ticket in tickets) <= 4
        for ticket in tickets:
            client.wait(ticket)


@pytest.mark.parametrize(
    ("setting", "value"),
    [("FASTDIST_INSECURE", "1"), ("FASTDIST_SECRET", "the secret of others")],
    ids=["none", "others"],
)
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:FASTDIST_INSECURE=1")
def test_clients_without_the_secret_are_rejected(
    monkeypatch: pytest.MonkeyPatch, setting: str, value: str
) -> None:
    with Server("tcp://127.0.0.1:*") as server:
        with monkeypatch.context() as patch:
            patch.setenv(setting, value)
            client = Client([server.address], timeout_s=3)
        with client, pytest.raises(UnavailableError, match="does this client have its secret"):
            client.stats(0)
        with Client([server.address], timeout_s=5) as client:
            client.stats(0)
        assert server.stats()["requests"] == 1


@pytest.mark.usefixtures("insecure")
def test_without_a_secret() -> None:
    with Server("tcp://127.0.0.1:*") as server, Client([server.address], timeout_s=5) as client:
        assert client.stats(0)["objects"] == []


@pytest.mark.skipif(os.getuid() != 0, reason="needs another user's process")
def test_another_users_program_at_a_path_hears_nothing(tmp_path: Path) -> None:
    path = tmp_path / "server"
    heard = tmp_path / "heard"
    pid = os.fork()
    if pid == 0:
        try:
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(str(path))
                to = os.open(heard, os.O_CREAT | os.O_WRONLY)
                os.setresuid(65534, 65534, 65534)
                listener.listen()
                while True:
                    connection, _ = listener.accept()
                    connection.settimeout(5)
                    message = b""
                    with contextlib.suppress(ConnectionError):
                        connection.send(struct.pack("<8s?B", b"FDLINK1<", False, 0))
                        message = connection.recv(100)
                    os.write(to, message or b"closed\n")
        finally:
            os._exit(1)
    try:
        wait_until(lambda: heard.exists() and path.exists())
        with (
            Client([f"ipc://{path}"], timeout_s=1, grace_s=0.5) as client,
            pytest.raises(UnavailableError, match="a fastdist parameter server of this user"),
        ):
            client.stats(0)
        wait_until(lambda: heard.read_bytes() != b"")
        assert set(heard.read_text().split()) == {"closed"}
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_a_server_may_appear_on_a_foreign_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as foreign:
        foreign.settimeout(20)
        address = f"tcp://127.0.0.1:{foreign.getsockname()[1]}"
        with Client([address], timeout_s=20, grace_s=20) as client:
            servers = []

            def answer() -> None:
                connection, _ = foreign.accept()
                connection.sendall(b"HTTP/1.0 400 Bad request\r\n\r\n" + bytes(100))
                connection.close()
                foreign.close()
                servers.append(Server(address))

            answering = threading.Thread(target=answer)
            answering.start()
            assert "objects" in client.stats(0)
            answering.join()
            servers[0].close()


def test_addresses_that_are_none() -> None:
    with pytest.raises(ValueError, match=r"tcp://127\.0\.0\.1:99999: Port out of range"):
        Server("tcp://127.0.0.1:99999")
    with pytest.raises(OSError, match=r"tcp://192\.0\.2\.1:4000: "):  # not this machine's
        Server("tcp://192.0.2.1:4000")
    with pytest.raises(OSError, match="the path of a socket has at most 107 bytes: choose"):
        Server(f"ipc:///tmp/{'long' * 30}")


def test_two_servers_at_one_path(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/server"
    with Server(address):
        with pytest.raises(OSError, match=r"server: another process listens there"):
            Server(address)
        with Client([address]) as client:
            client.stats(0)
    with socket.socket(socket.AF_UNIX) as left:  # by a process that was killed
        left.bind(f"{tmp_path}/server")
    with Server(address), Client([address]) as client:
        client.stats(0)


# --- harmful input ----------------------------------------------------------------------


def test_tables_fit_into_memory(
    server: Server, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fastdist.ps.wire.specs.usable_memory_bytes", lambda: 16_000)
    needs = "a table's rows need 1600000 bytes, and this process may use 16000"
    with pytest.raises(MemoryError, match=needs):
        client.create(0, RowsSpec("large", 4, SGD, rows=100_000))
    client.create(0, RowsSpec("small", 4, SGD, rows=1000))


def test_errors_come_back(server: Server, client: Client) -> None:
    dense = client.create(0, DenseSpec("w", (2,), SGD), np.zeros(2))
    rows = client.create(0, ROWS)
    fixed = client.create(0, RowsSpec("fixed", 4, SGD, rows=10))
    ids, values = np.array([1, 2]), np.zeros((2, 4), np.float32)
    cases: list[tuple[type[Exception], str, Callable[[], Any]]] = [
        (ValueError, "object 9 does not exist", lambda: pull(client, 0, dense + 9, (2,))),
        (ValueError, "is a DenseSpec", lambda: pull_rows(client, 0, dense, ids, 4)),
        (ValueError, "is a RowsSpec", lambda: push(client, 0, rows, np.zeros(2))),
        (
            ValueError,
            r"shape \(2, 4\), got 16",
            lambda: push_rows(client, 0, rows, ids, values[:1]),
        ),
        (ValueError, "3 elements from 0 on", lambda: push(client, 0, dense, np.zeros(3))),
        (IndexError, "10", lambda: pull_rows(client, 0, fixed, [3, 10], 4)),
        (TypeError, "must be integers", lambda: pull_rows(client, 0, rows, [0.5], 4)),
        (
            ValueError,
            "bytes of JSON, the limit is",
            lambda: client.create(0, RowsSpec("r" * (4 << 20), 4, SGD)),
        ),
        (ValueError, "exists as", lambda: client.create(0, RowsSpec("rows", 5, SGD))),
        (ValueError, "no initial", lambda: client.create(0, DenseSpec("x", (2,), SGD))),
        (ValueError, "got int4", lambda: client.create(0, RowsSpec("i", 2, SGD, wire="int4"))),
        (ValueError, "Lion", lambda: client.create(0, RowsSpec("y", 2, RuleSpec("Lion")))),
        (
            ValueError,
            r"expected values of shape \(3,\), got 8 bytes instead of 12",
            lambda: client.create(0, DenseSpec("z", (3,), SGD), np.zeros(2)),
        ),
    ]
    for kind, message, call in cases:
        with pytest.raises(kind, match=message):
            call()
    assert (pull(client, 0, dense, (2,)) == 0).all()
    assert server.stats()["malformed"] == 0


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"{}",
        b'{"DenseSpec": {}}',
        b'{"Other": {"rule": {"name": "SGD"}}}',
        b'{"DenseSpec": {"name": "w", "shape": [-1], "rule": {"name": "SGD"}}}',
        b'{"DenseSpec": {"name": "w", "shape": [1], "rule": 3}}',
        b"[" * 60_000,
    ],
)
def test_invalid_specs(data: bytes) -> None:
    with pytest.raises(ValueError, match="not a spec of a variable or table"):
        from_json(data)


def test_specs_round_trip() -> None:
    rule = RuleSpec("Adam", {"lr": 0.1, "betas": [0.9, 0.99]})
    rows = RowsSpec("r", 8, rule, initializer=("uniform", -1.0, 1.0), seed=3, max_rows=9)
    for spec in (rows, DenseSpec("d", (), SGD), DenseSpec("d", (2, 0), rule, "bfloat16")):
        assert from_json(to_json(spec)) == spec
    assert rows.make().dim == 8


def test_another_version(server: Server, client: Client) -> None:
    header = bytearray(Header(Op.STATS, 1, b"c" * 16).pack())
    for version, size in ((VERSION + 1, len(header)), (1, 48), (2, 200)):
        header[4] = version
        with RawClient(server.address) as plain:
            plain.send(bytes(header).ljust(size)[:size])
            answer, text = plain.receive()
        assert Header.unpack(answer).number == 1
        expected = (
            f"the server speaks version {VERSION} of the protocol, the client version {version}"
        )
        assert expected.encode() in text
    client.stats(0)
    with RawServer() as other, Client([other.address], timeout_s=20) as peer:
        other.connect(peer)
        ticket = peer.submit(0, Op.STATS)
        connection, (asked, *_) = other.receive()
        answer = replace(Header.unpack(asked), kind=Status.FAILED, version=VERSION + 1)
        other.send(connection, answer.pack(), b"the server speaks another version")
        with pytest.raises(FastdistError, match=r"speaks another version \(server 0 at"):
            peer.wait(ticket)


@pytest.mark.parametrize("seconds", [1, pytest.param(10, marks=pytest.mark.slow)])
def test_garbage(server: Server, client: Client, seconds: float) -> None:
    """Random bytes, frames and headers do not affect well-behaved clients."""
    dense = client.create(0, DenseSpec("w", (2,), SGD), np.ones(2))
    rounds = fuzz(
        server, client, dense, seconds=seconds * 0.75
    )  # one-time allocations, such as buffers
    before = resident_bytes()
    fuzz(server, client, dense, rounds=rounds)
    assert server.failure is None
    assert server.stats()["malformed"] > 100
    assert resident_bytes() - before < 30 << 20
    assign(client, Item(0, dense, np.ones(2, np.float32)))
    assert (pull(client, 0, dense, (2,)) == 1).all()


def fuzz(
    server: Server,
    client: Client,
    dense: int,
    *,
    seconds: float = math.inf,
    rounds: int = sys.maxsize,
) -> int:
    """Send the same random bytes at each call; return the number of rounds."""
    rng = random.Random(1)
    port = int(server.address.rsplit(":", 1)[1])
    numbers = [dense, dense + 1, 0, rng.randrange(2**64)]
    deadline, count = time.monotonic() + seconds, 0
    with RawClient(server.address) as plain:
        while time.monotonic() < deadline and count < rounds:
            count += 1
            for _ in range(200):
                plain.send(*random_request(rng, numbers))
            while plain.receive(0.0):
                pass
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)) as s:
                s.sendall(rng.randbytes(rng.randrange(1, 2000)))
            assert pull(client, 0, dense, (2,)).shape == (2,)
    return count


# These two are valid requests of any client.
_HARMLESS = [op for op in Op if op not in (Op.RESET, Op.END)]


def random_request(rng: random.Random, numbers: list[int]) -> list[bytes]:
    """Return a random request; half of them have a valid header, some a valid body."""
    bodies = [b"", b"{}", b"[]", b"[1, 2]", b'{"weight": 1, "objects": []}', bytes(8)]
    frames = [
        rng.choice([*bodies, rng.randbytes(rng.choice((1, 48, HEADER_BYTES, 500)))])
        for _ in range(3)
    ]
    if rng.random() < 0.5:
        header = Header(
            rng.choice(_HARMLESS),
            rng.randrange(2**64),
            bytes([rng.randrange(8)]) * 16,
            rng.choice(numbers),
            rng.choice((0, rng.randrange(2**64))),
            rng.randrange(4),
        )
        frames[0] = header.pack()
    return frames[: rng.randrange(1, 4)]


def resident_bytes() -> int:
    """Return this process's memory without what was freed, of which malloc keeps some."""
    ctypes.CDLL(None).malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.slow
def test_a_message_beyond_the_limit() -> None:
    with Server(max_frame_bytes=1 << 16) as server:
        with Client([server.address], timeout_s=3) as client:
            dense = client.create(0, DenseSpec("w", (2,), SGD), np.ones(2))
            with pytest.raises(UnavailableError):
                push(client, 0, dense, np.zeros(1 << 20))
        with Client([server.address], timeout_s=5) as client:
            assert (pull(client, 0, dense, (2,)) == 1).all()


WITHOUT_CRYPTOGRAPHY = """
import sys
sys.modules["cryptography"] = None
from fastdist import ps
with ps.Server() as server, ps.Client([server.address]) as client:
    client.stats(0)
for use in (lambda: ps.Server("tcp://127.0.0.1:*"), lambda: ps.Client(["tcp://127.0.0.1:1"])):
    try:
        use()
    except ImportError as error:
        assert "need cryptography: pip install 'cryptography>=47'" in str(error)
    else:
        raise AssertionError
"""


def test_only_tcp_needs_cryptography() -> None:
    subprocess.run([sys.executable, "-c", WITHOUT_CRYPTOGRAPHY], check=True)


def test_a_server_rejects_invalid_objects(client: Client) -> None:
    with pytest.raises((ValueError, MemoryError, FastdistError)):
        client.create(0, RowsSpec("huge", 1 << 40, SGD, rows=1 << 40))
    client.stats(0)


@pytest.mark.parametrize("make", ["file", "link", "folder", "fifo"])
def test_a_server_removes_nothing_but_sockets(tmp_path: Path, make: str) -> None:
    place, other = tmp_path / "model.safetensors", tmp_path / "other"
    other.write_text("three weeks")
    {
        "file": lambda: place.write_text("three weeks"),
        "link": lambda: place.symlink_to(other),
        "folder": place.mkdir,
        "fifo": lambda: os.mkfifo(place),
    }[make]()
    before = place.lstat()
    with pytest.raises(OSError, match=r"a file that is no socket has this name"):
        Server(f"ipc://{place}")
    assert place.lstat().st_ino == before.st_ino
    assert other.read_text() == "three weeks"
