"""Slow networks and busy servers: nothing is sent twice, and the error says what is wrong."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq
from fastdist.errors import UnavailableError
from fastdist.ps import Client, DenseSpec, Item, RowsSpec, RuleSpec, Server
from fastdist.ps.server import service
from fastdist.ps.server.send_buffers import SendBuffers
from fastdist.ps.wire.batches import PART_SIZE, pack_steps
from fastdist.ps.wire.protocol import BusyError, Header, Op, Status
from fastdist.ps.wire.snapshot import Part

SGD = RuleSpec("SGD", {"lr": 1.0})
MIB = 1 << 20


@pytest.fixture
def by_hand() -> Iterator[zmq.Socket[bytes]]:
    """Return a socket that plays a server: the test sends its replies."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.setsockopt(zmq.RCVTIMEO, 5000)
        router.setsockopt(zmq.LINGER, 0)
        router.bind("tcp://127.0.0.1:*")
        yield router


def received(router: zmq.Socket[bytes]) -> tuple[bytes, Header]:
    identity, header = router.recv_multipart()[:2]
    return identity, Header.unpack(header)


def reply(
    router: zmq.Socket[bytes], request: tuple[bytes, Header], status: Status, body: bytes = b"{}"
) -> None:
    identity, asked = request
    answer = Header(status, asked.number, asked.client, asked.object)
    router.send_multipart([identity, answer.pack(), body])


@pytest.mark.parametrize("is_busy", [False, True])
def test_values_from_before_an_earlier_change_are_not_taken(
    by_hand: zmq.Socket[bytes], is_busy: bool
) -> None:
    """They come after a reconnection; a server that is busy has applied the change."""
    values = np.zeros(1, np.float32)
    with Client([by_hand.getsockopt_string(zmq.LAST_ENDPOINT)], timeout_s=10) as client:
        (change,) = client.begin_change([Item(0, 1, np.ones(1, np.float32))])
        (read,) = client.begin_read([Item(0, 1, values)])
        requests = [received(by_hand) for _ in range(2)]

        def answer_read(value: float) -> None:
            body = pack_steps([1]) + np.float32(value).tobytes()
            reply(by_hand, requests[1], Status.OK, body)

        if is_busy:
            reply(by_hand, requests[0], Status.BUSY, b"")
            answer_read(5)
            client.wait(read)
            assert values == 5
        answer_read(7)
        reply(by_hand, requests[0], Status.OK, b"")
        client.wait(change)
        assert read.is_done is is_busy
        answer_read(8)
        client.wait(read)
    assert values == (5 if is_busy else 8)


def test_the_timeout_counts_from_the_last_reply(
    by_hand: zmq.Socket[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [100.0]
    with Client([by_hand.getsockopt_string(zmq.LAST_ENDPOINT)], timeout_s=10) as client:
        tickets = [client.submit(0, Op.STATS) for _ in range(3)]
        requests = [received(by_hand) for _ in tickets]
        monkeypatch.setattr("fastdist.ps.client.client.time.monotonic", lambda: clock[0])
        for ticket in tickets:
            ticket.began = 100.0
        for ticket, request in zip(tickets[:2], requests[:2], strict=True):
            clock[0] += 8
            reply(by_hand, request, Status.OK)
            client.wait(ticket)
        clock[0] += 11
        with pytest.raises(UnavailableError, match="STATS for 10 s, but the connection holds") as e:
            client.wait(tickets[2])
        assert "keys" not in str(e.value)
        by_hand.setsockopt(zmq.RCVTIMEO, 0)
        with pytest.raises(zmq.Again):  # no request was repeated
            by_hand.recv()


def test_a_refused_request_is_sent_again_when_a_reply_arrives(by_hand: zmq.Socket[bytes]) -> None:
    address = by_hand.getsockopt_string(zmq.LAST_ENDPOINT)
    with Client([address], timeout_s=20, retry_s=1000) as client:
        first, second = client.submit(0, Op.HELLO), client.submit(0, Op.STATS)
        requests = [received(by_hand) for _ in range(2)]
        reply(by_hand, requests[1], Status.BUSY)
        reply(by_hand, requests[0], Status.OK)
        client.wait(first)
        again = received(by_hand)
        assert again[1].number == requests[1][1].number
        reply(by_hand, again, Status.OK)
        client.wait(second)


def test_a_refused_request_alone_is_sent_again_later(by_hand: zmq.Socket[bytes]) -> None:
    address = by_hand.getsockopt_string(zmq.LAST_ENDPOINT)
    with Client([address], timeout_s=20, retry_s=0.01) as client:
        ticket = client.submit(0, Op.STATS)

        def answer() -> None:
            for status in (Status.BUSY, Status.BUSY, Status.OK):
                reply(by_hand, received(by_hand), status)

        answering = threading.Thread(target=answer)
        answering.start()
        client.wait(ticket)
        answering.join()


class Socket:
    """Takes messages, and sends none until the test says so."""

    class Tracker:
        done = False

    def __init__(self) -> None:
        self.trackers: list[Socket.Tracker] = []

    def send(self, body: Any, *, copy: bool, track: bool) -> Socket.Tracker:
        del body
        assert track
        assert not copy
        self.trackers.append(self.Tracker())
        return self.trackers[-1]


def test_replies_that_are_not_taken_are_limited() -> None:
    way: Any = Socket()
    buffers = SendBuffers(10 * MIB)

    def send(client: bytes) -> None:
        buffers.send(way, buffers.take(4 * MIB, client), client)

    send(b"slow")
    send(b"slow")
    with pytest.raises(BusyError, match="8388608 bytes of replies"):
        send(b"slow")
    send(b"other")
    with pytest.raises(BusyError):
        send(b"other")
    for tracker in way.trackers[:2]:
        tracker.done = True
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
        got = client.pull_rows(0, table, ids, 64)
        assert server.stats()["requests"] == before + 3
        np.testing.assert_array_equal(got[5:7], client.pull_rows(0, table, ids[5:7], 64))
        np.testing.assert_array_equal(got[-1:], client.pull_rows(0, table, [0], 64))


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
        with zmq.Context() as context, context.socket(zmq.DEALER) as plain:
            plain.setsockopt(zmq.RCVTIMEO, 5000)
            plain.setsockopt(zmq.LINGER, 0)
            plain.connect(server.address)
            for _ in range(2):
                plain.send_multipart(request)
            header, text = plain.recv_multipart()
            assert Header.unpack(header).kind == Status.BUSY
            assert text == b"SAVE is being applied"
            may_end.set()
            replies = [plain.recv_multipart()]
            plain.send_multipart(request)
            replies.append(plain.recv_multipart())
        assert all(Header.unpack(header).kind == Status.OK for header, _ in replies)
        assert [body for _, body in replies] == [b'["file"]'] * 2
        assert calls == [True]


def test_a_server_that_lets_nobody_in_may_be_overloaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
        with Client([address], timeout_s=0.2) as client:
            with pytest.raises(UnavailableError, match="or is it overloaded") as caught:
                client.hello(0)
            assert "keys" not in str(caught.value)
