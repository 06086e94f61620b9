"""Ends of connections to servers and clients whose messages a test writes by hand."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import closing
from typing import Any

from fastdist.link.connections import Connections
from fastdist.link.listener import Listener
from fastdist.ps import Client
from fastdist.ps.wire.protocol import Header, Op, Status


class RawClient:
    """A connection to a server, a worker, or another listener."""

    def __init__(self, address: str) -> None:
        self._connections = Connections([address])
        end_s = time.monotonic() + 20
        while not self._connections[0].is_connected:
            self._connections.poll(0.1)
            assert time.monotonic() < end_s

    def __enter__(self) -> RawClient:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        self._connections.close(linger_s=1.0)

    def send(self, *frames: Any) -> None:
        self._connections[0].send(frames[0], frames[1:])

    def receive(self, timeout_s: float = 5.0) -> list[bytes]:
        """Return the frames of the next message; none if none has arrived in time."""
        end_s = time.monotonic() + timeout_s
        while True:
            message = next(self._connections[0].receive(), None)
            if message is not None:
                return [bytes(frame) for frame in message]
            if time.monotonic() > end_s:
                return []
            self._connections.poll(min(timeout_s, 0.1))


Request = tuple[int, Sequence[memoryview]]


class RawServer:
    """A listener that a test answers for."""

    def __init__(self) -> None:
        self._listener = Listener("tcp://127.0.0.1:*")
        self.address = self._listener.address
        self._arrived: queue.Queue[Request] = queue.Queue()
        self._leaving: deque[tuple[Any, ...]] = deque()
        self._is_closing = False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def __enter__(self) -> RawServer:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        self._is_closing = True
        self._listener.wake()
        self._thread.join()

    def _run(self) -> None:
        with closing(self._listener):
            while not self._is_closing:
                received = self._listener.receive()
                while self._leaving:
                    self._listener.send(*self._leaving.popleft())
                if received is not None:
                    self._arrived.put(received)

    def connect(self, client: Client, server: int = 0) -> None:
        """Let a client connect to this server, which has this number."""
        ticket = client.submit(server, Op.STATS)
        answering = threading.Thread(target=lambda: self.reply(self.receive()))
        answering.start()
        client.wait(ticket)
        answering.join()

    def receive(self, timeout_s: float = 5.0) -> Request:
        """Return the connection and the frames of the next message.

        Raises:
            queue.Empty: none has arrived in time.
        """
        return self._arrived.get(timeout=timeout_s)

    def send(self, connection: int, *frames: Any) -> None:
        self._leaving.append((connection, *frames))
        self._listener.wake()

    def reply(self, request: Request, body: bytes = b"{}", status: Status = Status.OK) -> None:
        connection, frames = request
        asked = Header.unpack(frames[0])
        answer = Header(status, asked.number, asked.client, asked.object)
        self.send(connection, answer.pack(), body)
