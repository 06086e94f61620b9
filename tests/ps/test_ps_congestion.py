"""Slow networks and busy servers: nothing is sent twice, and the error says what is wrong."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from fastdist.errors import UnavailableError
from fastdist.link.stream import Upload
from fastdist.ps import Client, DenseSpec, Item, RowsSpec, RuleSpec, Server
from fastdist.ps.server import service
from fastdist.ps.server.send_buffers import SendBuffers
from fastdist.ps.wire.protocol import PART_SIZE, BusyError, Header, Op, Status
from fastdist.ps.wire.snapshot import Part
from raw_link import RawClient, RawServer
from sharded_things import pull_rows

SGD = RuleSpec("SGD", {"lr": 1.0})
MIB = 1 << 20


@pytest.fixture
def by_hand() -> Iterator[RawServer]:
    """Return a server whose replies the test makes."""
    with RawServer() as made:
        yield made


@pytest.mark.slow
def test_the_timeout_counts_from_the_last_reply(by_hand: RawServer) -> None:
    with Client([by_hand.address], timeout_s=1) as client:
        by_hand.connect(client)
        tickets = [client.submit(0, Op.STATS) for _ in range(3)]

        def answer() -> None:
            for _ in range(2):
                request = by_hand.receive()
                time.sleep(0.45)
                by_hand.reply(request)

        answering = threading.Thread(target=answer)
        answering.start()
        began = time.monotonic()
        with pytest.raises(UnavailableError, match="STATS for 1 s, but the connection holds") as e:
            client.wait(tickets[2])
        assert time.monotonic() - began > 1.8
        assert "keys" not in str(e.value)
        answering.join()
        assert len(by_hand.receive()[1]) == 1


def test_a_pause_of_the_client_itself_does_not_count(by_hand: RawServer) -> None:
    with Client([by_hand.address], timeout_s=0.5, grace_s=20) as client:
        by_hand.connect(client)
        ticket = client.submit(0, Op.STATS)
        by_hand.receive()
        client._connections[0].lose()
        time.sleep(0.7)
        answering = threading.Thread(target=lambda: by_hand.reply(by_hand.receive()))
        answering.start()
        client.wait(ticket)
        answering.join()


@pytest.mark.slow
@pytest.mark.usefixtures("insecure")
def test_large_messages_are_given_time() -> None:
    """A server takes 10 MB in two seconds; the timeout counts from the last of them."""
    nbytes = 10_000_000
    with socket.create_server(("127.0.0.1", 0)) as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        taken = bytearray()
        is_over = threading.Event()

        def take() -> None:
            connection, _ = slow.accept()
            with connection:
                greeting = connection.recv(100)
                connection.sendall(greeting.replace(b">", b"<"))
                while len(taken) < nbytes:
                    time.sleep(0.02)
                    taken.extend(connection.recv(100_000))
                is_over.wait(20)

        taking = threading.Thread(target=take)
        taking.start()
        address = f"tcp://127.0.0.1:{slow.getsockname()[1]}"
        with Client([address], timeout_s=0.7) as client:
            ticket = client.submit(0, Op.ASSIGN, 0, [bytes(nbytes)])
            with pytest.raises(UnavailableError, match=r"has not answered ASSIGN for 0\.7 s, but"):
                client.wait(ticket)
            assert len(taken) > nbytes - (5 << 20)  # what the kernel keeps
        is_over.set()
        taking.join()


def test_a_refused_request_is_sent_again_when_a_reply_arrives(by_hand: RawServer) -> None:
    with Client([by_hand.address], timeout_s=20, retry_s=1000) as client:
        by_hand.connect(client)
        first, second = client.submit(0, Op.STATS), client.submit(0, Op.STATS)
        requests = [by_hand.receive() for _ in range(2)]
        by_hand.reply(requests[1], status=Status.BUSY)
        by_hand.reply(requests[0])
        client.wait(first)
        again = by_hand.receive()
        assert Header.unpack(again[1][0]) == Header.unpack(requests[1][1][0])
        by_hand.reply(again)
        client.wait(second)


def test_a_refused_request_alone_is_sent_again_later(by_hand: RawServer) -> None:
    with Client([by_hand.address], timeout_s=20, retry_s=0.01) as client:
        ticket = client.submit(0, Op.STATS)

        def answer() -> None:
            for status in (Status.BUSY, Status.BUSY, Status.OK):
                by_hand.reply(by_hand.receive(), status=status)

        answering = threading.Thread(target=answer)
        answering.start()
        client.wait(ticket)
        answering.join()


def test_requests_are_sent_again_in_order_after_a_reconnection() -> None:
    """Values from before an earlier change would be wrong."""
    with Server() as server, Client([server.address]) as client:
        number = client.create(0, DenseSpec("w", (1,), SGD), np.zeros(1))
        for step in range(1, 20):
            client._connections[0].lose()
            (change,) = client.begin_change([Item(0, number, np.full(1, -1.0, np.float32))])
            item = Item(0, number, np.zeros(1, np.float32))
            (read,) = client.begin_read([item])
            client.wait(read)
            assert item.values == step
            client.wait(change)


def test_replies_that_are_not_taken_are_limited() -> None:
    buffers = SendBuffers(10 * MIB)
    uploads = []

    def send(client: bytes) -> None:
        body = buffers.take(4 * MIB, client)
        uploads.append(Upload([body.data]))
        buffers.note_sent(uploads[-1], body, client)

    send(b"slow")
    send(b"slow")
    with pytest.raises(BusyError, match="8388608 bytes of replies"):
        send(b"slow")
    send(b"other")
    with pytest.raises(BusyError):
        send(b"other")
    for upload in uploads[:2]:
        upload.parts.clear()
    send(b"other")
    send(b"slow")
    large = SendBuffers(MIB).take(100 * MIB, b"first")
    assert large.nbytes == 100 * MIB


def test_a_large_lookup_is_several_requests() -> None:
    rows = 3 * PART_SIZE // 64
    with Server() as server, Client([server.address]) as client:
        table = client.create(0, RowsSpec("t", 64, SGD, rows, ("uniform", 0.0, 1.0)))
        before = server.stats()["requests"]
        ids = np.arange(rows)[::-1]
        got = pull_rows(client, 0, table, ids, 64)
        assert server.stats()["requests"] == before + 3
        np.testing.assert_array_equal(got[5:7], pull_rows(client, 0, table, ids[5:7], 64))
        np.testing.assert_array_equal(got[-1:], pull_rows(client, 0, table, [0], 64))


def test_a_repetition_of_a_running_change_is_asked_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The reply may go to a connection that is broken."""
    may_end = threading.Event()
    calls = []

    def slow(*_: object) -> list[str]:
        calls.append(may_end.wait(20))
        return ["file"]

    monkeypatch.setattr(service, "save", slow)
    with Server() as server, Client([server.address]) as client:
        number = client.create(0, DenseSpec("w", (5,), SGD), np.zeros(5))
        about = {"part": asdict(Part("w", 0, 5)), "stem": str(tmp_path / "x")}
        request = [
            Header(Op.SAVE, 1, b"c" * 16, number, floor=1).pack(),
            json.dumps(about).encode(),
        ]
        with RawClient(server.address) as plain:
            for _ in range(2):
                plain.send(*request)
            header, text = plain.receive()
            assert Header.unpack(header).kind == Status.BUSY
            assert text == b"SAVE is being applied"
            may_end.set()
            replies = [plain.receive()]
            plain.send(*request)
            replies.append(plain.receive())
        assert all(Header.unpack(header).kind == Status.OK for header, _ in replies)
        assert [body for _, body in replies] == [b'["file"]'] * 2
        assert calls == [True]


def test_a_server_that_lets_nobody_in_may_be_overloaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
        with Client([address], timeout_s=0.2) as client:
            with pytest.raises(UnavailableError, match="or is it overloaded") as caught:
                client.stats(0)
            assert "keys" not in str(caught.value)
