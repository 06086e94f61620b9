"""Connections of clients and servers: strangers, proofs of the secret, and changed bytes."""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
import struct
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import fastdist._core as _core
import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from fastdist.errors import FastdistError
from fastdist.link.addresses import is_local
from fastdist.link.connections import Connections
from fastdist.link.listener import _MAX_STRANGERS, Listener
from fastdist.link.sealing import Handshake
from fastdist.link.stream import Stream
from fastdist.ps import Client, DenseSpec, Item, RuleSpec, Server
from fastdist.ps.client.items import names_of
from fastdist.ps.server import service
from fastdist.ps.server.send_buffers import SendBuffers
from fastdist.ps.wire.protocol import PART_SIZE, Header, Op
from fastdist.ps.wire.snapshot import Part
from launched import wait_until
from raw_link import RawClient, RawServer
from sharded_things import pull, push
from unreliable import Unreliable

SGD = RuleSpec("SGD", {"lr": 1.0})
Pair = tuple[Stream, Stream]


@pytest.fixture
def server() -> Iterator[Server]:
    with Server("tcp://127.0.0.1:*") as made:
        yield made


@pytest.fixture
def sockets() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Two ends of a connection."""
    ends = socket.socketpair()
    for end in ends:
        end.setblocking(False)
    yield ends
    for end in ends:
        end.close()


def introduced(sockets: tuple[socket.socket, socket.socket], key: bytes | None) -> Pair:
    """Return streams that have greeted each other."""
    connector = Stream(sockets[0], key, is_listener=False)
    listener = Stream(sockets[1], key, is_listener=True)
    while not (connector.is_open and listener.is_open):
        assert connector.receive() is None
        assert listener.receive() is None
    return connector, listener


@pytest.mark.parametrize("key", [None, bytes(range(32))], ids=["open", "sealed"])
@pytest.mark.parametrize("nbytes", [0, 1, 100, 1 << 16, (1 << 18) - 1, 1 << 18, 3_000_001])
def test_messages(
    sockets: tuple[socket.socket, socket.socket], key: bytes | None, nbytes: int
) -> None:
    connector, listener = introduced(sockets, key)
    rng = np.random.default_rng(0)
    frames = [rng.bytes(size) for size in (5, nbytes, 0, nbytes, 3)]
    uploads = [connector.send(frames) for _ in range(3)]
    received: list[list[bytes]] = []
    while len(received) < 3:
        connector.flush()
        message = listener.receive()
        if message is not None:
            received.append([bytes(frame) for frame in message])
    assert received == [frames] * 3
    assert all(upload.done for upload in uploads)
    assert not listener.has_ahead


# Noise_NNpsk0_25519_AESGCM_SHA256 of the published vectors of cacophony.
NOISE_PROLOGUE = "4a6f686e2047616c74"
NOISE_SECRET = "54686973206973206d7920417573747269616e20706572737065637469766521"
NOISE_KEYS = (
    "893e28b9dc6ca8d611ab664754b8ceb7bac5117349a4439a6b0569da977c464a",
    "bbdb4cdbd309f1a1f2e1456967fe288cadd6f712d65dc7b7793d5e63da6b375b",
)
NOISE_HASH = "9f3b1f9afd7767767b5b9d1069844a6154fdbdcc36dfb3e31c0fffc5c973d530"
NOISE_MESSAGES = (
    (
        "4c756477696720766f6e204d69736573",
        "ca35def5ae56cec33dc2036731ab14896bc4c75dbb07a61f879f8e3afa4c7944"
        "7c37a89fc17813788d30df2d59501d6066f5f8aecc3406bbd9829f2d24a531b1",
    ),
    (
        "4d757272617920526f746862617264",
        "95ebc60d2b1fa672c1f46a8aa265ef51bfe38e7ccb39ec5be34069f144808843"
        "2f29d79368ef9de4e1ae7a362fb05bf0ad668e026bf5714554497b3a720461",
    ),
    (
        "462e20412e20486179656b",
        "7c01e898a6201f36aecee532e29cd0b7f8ffa29d3366ad0dce39a6",
    ),
    (
        "4361726c204d656e676572",
        "a9ff535aace3db6a1da1a7fb00fe2de2622bb373abad9fb42c00e0",
    ),
    (
        "4a65616e2d426170746973746520536179",
        "6cfc49a3e65472edc2d0152abe5ce950170a8a47c959f30bd48b5f0aacf29adbfd",
    ),
    (
        "457567656e2042f6686d20766f6e2042617765726b",
        "9bc86e6d974ed21ba04604a94aa68de21677eb409ead070c0cd569b069ee19ba142aa4c1a9",
    ),
)


def test_the_handshake_is_noise() -> None:
    ends = [
        Handshake(
            bytes.fromhex(NOISE_SECRET),
            is_initiator=number == 0,
            prologue=bytes.fromhex(NOISE_PROLOGUE),
            private=X25519PrivateKey.from_private_bytes(bytes.fromhex(key)),
        )
        for number, key in enumerate(NOISE_KEYS)
    ]
    pairs = [(bytes.fromhex(text), bytes.fromhex(sealed)) for text, sealed in NOISE_MESSAGES]
    for number, (text, sealed) in enumerate(pairs[:2]):
        assert ends[number].write(text) == sealed
        assert ends[1 - number].read(sealed) == text
    assert [end.hash.hex() for end in ends] == [NOISE_HASH] * 2
    ways = [end.split() for end in ends]
    for number, (text, sealed) in enumerate(pairs[2:]):
        out, back = bytearray(len(sealed)), bytearray(len(text))
        ways[number % 2][0].seal(text, out)
        assert out == sealed
        ways[1 - number % 2][1].open(sealed, back)
        assert back == text


def test_a_recorded_handshake_is_refused(sockets: tuple[socket.socket, socket.socket]) -> None:
    key = os.urandom(32)
    said = bytearray()
    connector = Stream(sockets[0], key, is_listener=False)
    pair = socket.socketpair()
    with pair[0], pair[1]:
        for end in pair:
            end.setblocking(False)
        listener = Stream(pair[1], key, is_listener=True)
        while not listener.is_open:
            connector.receive()
            with contextlib.suppress(BlockingIOError):
                said += (part := sockets[1].recv(1000))
                pair[0].sendall(part)
            listener.receive()
            with contextlib.suppress(BlockingIOError):
                sockets[1].sendall(pair[0].recv(1000))
    assert key not in said
    pair = socket.socketpair()
    with pair[0], pair[1]:
        pair[1].setblocking(False)
        pair[0].sendall(said)
        again = Stream(pair[1], key, is_listener=True)
        with pytest.raises(ConnectionError, match="a record that the peer has not made"):
            again.receive()
        assert not again.is_open


@pytest.mark.parametrize("end", ["connector", "listener"])
def test_the_other_end_must_have_the_secret(
    sockets: tuple[socket.socket, socket.socket], end: str
) -> None:
    key, others = os.urandom(32), os.urandom(32)
    connector = Stream(sockets[0], others if end == "connector" else key, is_listener=False)
    listener = Stream(sockets[1], others if end == "listener" else key, is_listener=True)
    connector.receive()
    listener.receive()
    connector.receive()
    with pytest.raises(ConnectionError, match="the peer has another secret"):
        listener.receive()
    assert connector.receive() is None
    assert not connector.is_open
    assert not listener.is_open


def test_strangers_do_not_keep_others_out() -> None:
    with Server("tcp://127.0.0.1:*") as server, contextlib.ExitStack() as stack:
        port = int(server.address.rsplit(":", 1)[1])
        rng = random.Random(2)
        for i in range(2 * _MAX_STRANGERS):
            stranger = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
            with contextlib.suppress(OSError):
                stranger.sendall(rng.randbytes(rng.randrange(200)) if i % 2 else b"FDLINK1>\x01")
        with Client([server.address], timeout_s=20, grace_s=20) as client:
            assert client.stats(0)["objects"] == []
        assert len(server._listener._streams) <= _MAX_STRANGERS + 1
        assert server.stats()["requests"] == 1


@pytest.mark.slow
def test_changed_bytes_break_the_connection() -> None:
    with Server("tcp://127.0.0.1:*") as server:
        limits = (1_000, 1_000_000)
        way = Unreliable(server.address, limits, limits, changes=True)
        with Client([way.address], timeout_s=60, grace_s=60) as client:
            spec = DenseSpec("w", (20_000,), SGD)
            number = client.create(0, spec, np.zeros(20_000))
            for step in range(1, 9):
                push(client, 0, number, np.full(20_000, -1.0))
                assert (pull(client, 0, number, (20_000,)) == step).all()
        way.close()
        assert way.broken > 3


@pytest.mark.usefixtures("insecure")
def test_frames_that_no_message_has() -> None:
    with Server("tcp://127.0.0.1:*") as server:
        port = int(server.address.rsplit(":", 1)[1])
        with RawClient(server.address) as plain:
            plain.send(*[b"x"] * 6)  # malformed, and nothing else happens
            for count, size in ((0, 0), (7, 1), (1, 2**40), (2**63, 0)):
                with socket.create_connection(("127.0.0.1", port)) as bad:
                    bad.sendall(b"FDLINK1>\x00\x00" + np.array([count, *[size] * 6]).tobytes())
                    assert bad.recv(100) == b"FDLINK1<\x00\x00"
                    assert bad.recv(100) == b""
            with pytest.raises(AssertionError):
                assert plain.receive(0.05)
        assert server.stats()["malformed"] == 1


@pytest.mark.parametrize("address", ["", "tcp://", "tcp://host", "udp://host:1", "ipc://x", "x"])
def test_no_addresses(address: str) -> None:
    for use in (is_local, Server, lambda address: Connections([address])):
        with pytest.raises(ValueError, match=r"is no address: expected tcp://HOST:PORT or ipc:"):
            use(address)


def test_echo() -> None:
    ours, theirs = socket.socketpair()
    with ours:
        ours.settimeout(20)
        _core.echo(theirs.detach())
        for size in (1, 64, 1000):
            sent = os.urandom(size)
            ours.sendall(sent)
            came = b""
            while len(came) < size:
                came += ours.recv(size)
            assert came == sent
        ours.shutdown(socket.SHUT_WR)
        assert ours.recv(1) == b""


@pytest.mark.slow
@pytest.mark.usefixtures("insecure")
def test_a_client_that_takes_no_replies_is_not_heard(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fastdist.link.addresses._STUCK_MS", 100_000)  # else it may be gone
    port = int(server.address.rsplit(":", 1)[1])
    header = Header(Op.STATS, 1, b"c" * 16).pack()
    prefix = np.array([1, len(header), *[0] * 5]).tobytes()
    with socket.create_connection(("127.0.0.1", port)) as deaf:
        deaf.settimeout(1)
        deaf.sendall(b"FDLINK1>\x00\x00")
        with pytest.raises(TimeoutError):
            deaf.sendall((prefix + header) * 200_000)
        before = -1
        while server.stats()["requests"] != before:  # what has come is answered
            before = server.stats()["requests"]
            time.sleep(0.5)
        assert before < 200_000
        with Client([server.address]) as client:
            client.stats(0)
        assert server.stats()["requests"] == before + 1
        deaf.settimeout(20)
        while server.stats()["requests"] == before + 1:  # it is heard again once it takes them
            assert deaf.recv(1 << 16)


class Sender:
    """A connection that sends a READ of a large frame, which means nothing, as far as it can."""

    NBYTES = 40_000_000

    def __init__(self, server: Server) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.connect(server.address.removeprefix("ipc://"))
        self.unsent = self.NBYTES

    def __enter__(self) -> Sender:
        return self

    def __exit__(self, *error: object) -> None:
        self.socket.close()

    def send(self, nbytes: int = NBYTES, patience_s: float = 0.5) -> int:
        """Send so many bytes, until none are taken for `patience_s`; return what was taken."""
        if self.unsent == self.NBYTES:
            header = Header(Op.READ, 1, b"c" * 16).pack()
            prefix = np.array([2, len(header), self.NBYTES, *[0] * 4]).tobytes()
            self.socket.sendall(b"FDLINK1>\x00\x00" + prefix + header)
        self.socket.settimeout(patience_s)
        sent = 0
        with contextlib.suppress(TimeoutError):
            while sent < min(nbytes, self.unsent):
                sent += self.socket.send(bytes(min(nbytes - sent, self.unsent - sent, 1 << 20)))
        self.unsent -= sent
        return sent

    def is_answered(self) -> bool:
        """Wait for bytes beyond the greeting; False if the connection breaks instead."""
        self.socket.settimeout(20)
        try:
            return len(self.socket.recv(10)) == 10 and bool(self.socket.recv(1))
        except ConnectionError:
            return False


@contextlib.contextmanager
def senders(limit: int = 50_000_000) -> Iterator[tuple[Server, Sender, Sender]]:
    """Start a server with room for so many bytes, and connect two senders."""
    with (
        Server(max_staged_bytes=limit) as server,
        Sender(server) as first,
        Sender(server) as second,
    ):
        yield server, first, second


def test_arriving_messages_have_a_limit() -> None:
    with senders() as (server, first, second), Sender(server) as third:
        almost = Sender.NBYTES - 1
        assert first.send(almost) == almost
        assert second.send() < 15_000_000  # what the kernel takes
        assert third.send() < 15_000_000
        with Client([server.address]) as client:  # small messages pass
            client.stats(0)
        assert first.send() == 1
        assert first.is_answered()
        for each in (second, third):  # in their order
            each.send(patience_s=20)
            assert each.unsent == 0
            assert each.is_answered()


def test_larger_messages_than_the_limit_arrive_alone() -> None:
    with senders(1_000_000) as (_, first, second):
        almost = Sender.NBYTES - 1
        assert first.send(almost) == almost
        assert second.send() < 15_000_000
        first.socket.close()  # makes room
        second.send(patience_s=20)
        assert second.is_answered()


@pytest.mark.slow
def test_a_message_that_waits_trickles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastdist.link.listener._TRICKLE_S", 0.05)
    with senders() as (_, first, second):
        first.send(30_000_000)
        second.send(patience_s=5)
        assert second.unsent == 0
        assert second.is_answered()
        first.send()
        assert first.is_answered()


def test_a_connection_that_waits_may_break(monkeypatch: pytest.MonkeyPatch) -> None:
    polls: list[int] = []
    poll = Listener._poll
    monkeypatch.setattr(
        Listener, "_poll", lambda self, wait_s: polls.append(1) or poll(self, wait_s)
    )
    with senders() as (_, first, second):
        first.send(30_000_000)
        second.send()
        at_once = struct.pack("ii", 1, 0)
        second.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, at_once)
        second.socket.close()
        time.sleep(0.2)
        polls.clear()
        time.sleep(0.5)
        assert len(polls) < 50
        first.send()
        assert first.is_answered()


@pytest.mark.slow
def test_who_takes_memory_and_sends_nothing_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastdist.link.listener._STUCK_S", 1.0)
    monkeypatch.setattr("fastdist.link.listener._TRICKLE_S", 0.5)
    with senders() as (_, first, second):
        first.send(30_000_000)
        time.sleep(2)
        first.send(1000)  # while nobody waits, it may take its time
        second.send(patience_s=20)
        assert second.unsent == 0
        assert second.is_answered()
        assert not first.is_answered()


@pytest.mark.filterwarnings("ignore:This process")  # has threads
def test_a_forked_process_does_not_share_a_client(server: Server) -> None:
    with Client([server.address], timeout_s=20) as client:
        number = client.create(0, DenseSpec("w", (2,), SGD), np.zeros(2))
        child = os.fork()
        if child == 0:
            try:
                push(client, 0, number, np.ones(2))
            except FastdistError as error:
                is_told = "make one after the fork" in str(error)
                client.close()
                os._exit(not is_told)
            os._exit(2)
        assert os.waitpid(child, 0)[1] == 0
        push(client, 0, number, -np.ones(2))
        assert (pull(client, 0, number, (2,)) == 1).all()


@pytest.mark.filterwarnings("ignore:This process")  # has threads
def test_a_forked_process_leaves_the_socket() -> None:
    code = """
        import os, sys
        from fastdist import ps
        server = ps.Server()
        if os.fork() == 0:
            server.close()
            sys.exit(0)  # runs what is to be run at the exit
        assert os.wait()[1] == 0
        with ps.Client([server.address], timeout_s=5) as client:
            client.stats(0)
        print(os.path.dirname(server.address.removeprefix("ipc://")))
    """
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code)],
        capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    assert not os.path.exists(done.stdout.strip())  # removed at the exit


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
def test_all_addresses(host: str) -> None:
    if not Path("/proc/net/if_inet6").exists() and "::" in host:
        pytest.skip("needs IPv6")
    with Server("tcp://*:*") as server:
        port = server.address.rsplit(":", 1)[1]
        with Client([f"tcp://{host}:{port}"], timeout_s=5) as client:
            client.stats(0)


@pytest.mark.filterwarnings("ignore:This process")  # has threads
def test_a_forked_process_does_not_go_on_with_a_request() -> None:
    """It would encrypt other bytes with the numbers of this process's records."""
    listener = Listener("tcp://127.0.0.1:*")
    with contextlib.closing(listener), Client([listener.address], timeout_s=20) as client:
        while not client._connections[0].is_connected:
            client._connections.poll(0.01)
            listener.receive(0.01)
        big = np.zeros(20_000_000, np.uint8)  # more than the socket takes, which nobody reads
        ticket = client.submit(0, Op.ASSIGN, frames=[b"\0" * 8, big])
        stream = client._connections[0]._stream
        assert stream is not None
        assert not stream.is_flushed
        child = os.fork()
        if child == 0:
            try:
                client.wait(ticket)
            except FastdistError as error:
                with contextlib.suppress(ConnectionAbortedError):
                    stream.flush()
                    os._exit(3)
                is_told = "make one after the fork" in str(error)
                client.close()
                os._exit(not is_told)
            os._exit(2)
        assert os.waitpid(child, 0)[1] == 0


def test_uploads_of_a_broken_connection_are_over() -> None:
    """Otherwise their memory would count as in use for ever."""
    with RawServer() as by_hand, RawClient(by_hand.address) as plain:
        plain.send(b"x")
        connection, _ = by_hand.receive()
        upload = by_hand._listener.send(connection, bytes(50_000_000))
        assert upload is not None
        assert not upload.done
        plain._connections[0].lose()
        wait_until(lambda: upload.done)


@pytest.mark.slow
@pytest.mark.parametrize("change", ["push", "reset", "close"])
def test_values_on_their_way_do_not_change(server: Server, change: str) -> None:
    size = 40 * PART_SIZE  # more than the kernel keeps
    with Client([server.address]) as client, RawClient(server.address) as slow:
        spec = DenseSpec("w", (size,), SGD)
        initial = (np.arange(size) % 1000).astype(np.float32)
        number = client.create(0, spec, initial)
        for i in range(40):
            item = Item(0, number, np.empty(PART_SIZE, np.float32), begin=i * PART_SIZE)
            header = Header(Op.READ, i + 1, b"s" * 16)
            slow.send(header.pack(), names_of([item]))
        wait_until(lambda: server.stats()["requests"] == 41)
        if change == "push":
            push(client, 0, number, np.ones(size, np.float32))
        elif change == "reset":
            client.reset(0)
            client.create(0, spec, np.zeros(size, np.float32))
        for i in range(40):
            _, reply = slow.receive(20)
            values = np.frombuffer(reply, np.float32)
            begin = i * PART_SIZE
            np.testing.assert_array_equal(values, initial[begin : begin + PART_SIZE])
            if change == "close" and i == 20:
                break  # the client is gone before it has taken all
        if change == "push":
            np.testing.assert_array_equal(pull(client, 0, number, (size,)), initial - 1)


def test_values_are_not_lent_while_another_thread_changes_them(
    server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    may_end, has_begun = threading.Event(), threading.Event()
    taken = []
    take = SendBuffers.take

    def slow(*_: object) -> list[str]:
        has_begun.set()
        may_end.wait(20)
        return ["file"]

    def noted(self: SendBuffers, nbytes: int, client: bytes) -> object:
        taken.append(nbytes)
        return take(self, nbytes, client)

    def is_lent() -> bool:
        taken.clear()
        pull(client, 0, number, (PART_SIZE,))
        return not taken

    monkeypatch.setattr(service, "save", slow)
    monkeypatch.setattr(SendBuffers, "take", noted)
    with Client([server.address]) as client:
        number = client.create(0, DenseSpec("w", (PART_SIZE,), SGD), np.ones(PART_SIZE))
        wait_until(is_lent)  # the creation ends after its reply
        about = {"part": asdict(Part("w", 0, 5)), "stem": str(tmp_path / "x")}
        ticket = client.submit(0, Op.SAVE, number, [json.dumps(about).encode()])
        has_begun.wait(20)
        pull(client, 0, number, (PART_SIZE,))
        assert taken == [4 * PART_SIZE]
        may_end.set()
        client.wait(ticket)


SHORT_OF_MEMORY = """
import resource, sys
from fastdist.ps import Server

server = Server()
print(server.address, flush=True)
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (96 << 20), resource.RLIM_INFINITY))
sys.stdin.read()
"""


def test_a_request_for_which_the_server_has_no_memory() -> None:
    """It is refused; the connection and the requests before and after it go on."""
    command = [sys.executable, "-c", SHORT_OF_MEMORY]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        with Client([process.stdout.readline().strip()], timeout_s=20) as client:
            small = client.create(0, DenseSpec("small", (4,), SGD), np.ones(4))
            large = np.ones(60 << 20, np.float32)
            with pytest.raises(MemoryError, match=r"no memory for the frames of CREATE \(server 0"):
                client.create(0, DenseSpec("large", large.shape, SGD), large)
            push(client, 0, small, np.ones(4))
            assert (pull(client, 0, small, (4,)) == 0).all()
            assert not client._new
            assert client._connections[0].lost_at is None
        process.stdin.close()
