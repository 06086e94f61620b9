"""The coordinator's connection to one worker."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from fastdist.ps.coordinator.backlog import Call
from fastdist.ps.coordinator.messages import Kind, pack, set_options
from fastdist.ps.coordinator.shipping import Definition
from fastdist.ps.wire.access import present
from fastdist.ps.wire.keys import Keys

_RECONNECT_MS = 100
_RETRY_S = 1.0
# Calls that a worker has at once: the next is there when one ends. Of short ones, more.
_AHEAD, _MOST_AHEAD = 2, 8
_SHORT_S = 1e-3


class WorkerLink:
    """A connection that comes back by itself.

    What it sends before a greeting on a new connection, the worker does not obey.

    Args:
        context: of the dispatcher.
        address: of the worker.
        keys: of the job.

    Attributes:
        is_connected: whether somebody is there.
        is_ready: whether the worker takes calls.
        calls: what it has, by the number of the dispatch.
        news_number: of the last news that it got.
        trouble: why it is not there.
    """

    def __init__(self, context: zmq.Context[Any], address: str, keys: Keys) -> None:
        self.address = address
        self.is_connected = self.is_ready = False
        self.calls: dict[int, Call] = {}
        self.news_number = 0
        self._ahead = _AHEAD
        self._ended_at = 0.0  # the last call, on the monotonic clock
        self.trouble = "nobody answers"
        self._known: set[int] = set()
        self._context = context
        self._keys = keys
        self._failed_at: float | None = None  # the first time that no worker of the job answered
        self._open()

    def _open(self) -> None:
        self.socket = self._context.socket(zmq.DEALER)
        set_options(self.socket)
        # Without a queue that outlives connections, ZeroMQ drops what came before one was lost.
        self.socket.setsockopt(zmq.IMMEDIATE, 0)
        self.socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
        present(self.socket, self._keys)
        self.monitor = self.socket.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
        )
        self.socket.connect(self.address)

    @property
    def has_given_up(self) -> bool:
        """Whether it may need a new socket: ZeroMQ never tries another protocol's speaker again."""
        return self._failed_at is not None and time.monotonic() - self._failed_at > _RETRY_S

    def reopen(self) -> None:
        """Begin with a new socket."""
        self.close()
        self._failed_at = None
        self._open()

    def close(self) -> None:
        """Disconnect, when what was sent is on its way."""
        self.socket.disable_monitor()
        self.monitor.close(linger=0)
        self.socket.close(linger=1000 if self.is_connected else 0)

    def events(self) -> tuple[bool, bool]:
        """Whether the worker has come, and whether it was lost before that, or now."""
        connected = lost = False
        while self.monitor.poll(0):
            if recv_monitor_message(self.monitor)["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                connected = self.is_connected = True
                self._failed_at = None
                continue
            if not self.is_connected:
                self.trouble = "it has other keys, or is no worker of fastdist"
                self._failed_at = self._failed_at or time.monotonic()
            lost, connected = True, False
            self.is_connected = False
        return connected, lost

    @property
    def has_room(self) -> bool:
        """Whether the worker should have one more call."""
        return len(self.calls) < self._ahead

    def begin_call(self, number: int, call: Call) -> None:
        """It is about to be sent."""
        if not self.calls and time.monotonic() - self._ended_at > _SHORT_S:
            self._ahead = _AHEAD  # what comes now may be of another kind
        self.calls[number] = call

    def end_call(self, number: int) -> Call | None:
        """It has ended; None: it was somebody else's. Of short ones there had better be more."""
        call = self.calls.pop(number, None)
        now = time.monotonic()
        is_short = now - self._ended_at < _SHORT_S
        self._ahead = min(self._ahead + 1, _MOST_AHEAD) if is_short else _AHEAD
        self._ended_at = now
        return call

    def lose(self) -> None:
        """The worker is gone, and all that it had."""
        if self.is_ready:
            self.trouble = "the connection was lost"
        self.is_ready = False
        self.calls.clear()
        self._known.clear()
        self.news_number = 0

    def send(self, kind: Kind, number: int = 0, *frames: bytes) -> bool:
        """Send a message; False: nobody is connected."""
        try:
            self.socket.send_multipart([pack(kind, number), *frames], zmq.NOBLOCK)
            return True
        except zmq.Again:
            return False

    def receive(self) -> Iterator[list[bytes]]:
        """The messages that have come."""
        while True:
            try:
                yield self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return

    def define(self, definition: Definition) -> None:
        """Send a definition, and what it needs, unless the worker has it."""
        if definition.number in self._known:
            return
        for needed in definition.needs:
            self.define(needed)
        self._known.add(definition.number)
        self.send(Kind.DEFINE, definition.number, definition.blob)

    def forget(self, number: int) -> None:
        """The worker need not keep a definition any more."""
        if number in self._known:
            self._known.discard(number)
            self.send(Kind.FORGET, number)
