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
from fastdist.ps.wire.keys import Keys, use_client_keys

_RECONNECT_MS = 100
_RETRY_S = 1.0
# Calls that a worker has at once, so that the next is there when one ends; more if they are short.
_MIN_WINDOW, _MAX_WINDOW = 2, 8
_SHORT_S = 1e-3


class WorkerLink:
    """A connection that ZeroMQ restores by itself.

    A worker ignores messages that arrive before the HELLO of a new connection.

    Args:
        context: the dispatcher's context.
        address: the worker's address.
        keys: the job's keys.

    Attributes:
        is_connected: True if a process of the job is connected.
        is_ready: True if the worker accepts calls.
        is_replaced: True if the worker belongs to another coordinator.
        calls: the worker's calls, by the dispatcher's numbers.
        state_update_number: the number of the last state update that was sent.
        last_error: why the worker is not available.
    """

    def __init__(self, context: zmq.Context[Any], address: str, keys: Keys) -> None:
        self.address = address
        self.is_connected = self.is_ready = self.is_replaced = False
        self.calls: dict[int, Call] = {}
        self.state_update_number = 0
        self._window = _MIN_WINDOW
        self._ended_at = 0.0  # the last call, on the monotonic clock
        self.last_error = "no answer"
        self._known: set[int] = set()
        self._context = context
        self._keys = keys
        self._failed_at: float | None = None  # time of the first failed handshake
        self._open()

    def _open(self) -> None:
        self.socket = self._context.socket(zmq.DEALER)
        set_options(self.socket)
        # With IMMEDIATE=1, ZeroMQ would drop received messages when the connection is lost.
        self.socket.setsockopt(zmq.IMMEDIATE, 0)
        self.socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
        use_client_keys(self.socket, self._keys)
        self.monitor = self.socket.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
        )
        self.socket.connect(self.address)

    @property
    def needs_new_socket(self) -> bool:
        """True if the connection must be made anew.

        ZeroMQ does not retry after another protocol's answer.
        """
        return self._failed_at is not None and time.monotonic() - self._failed_at > _RETRY_S

    def connect_again(self) -> None:
        """Need a new socket soon."""
        self._failed_at = time.monotonic()

    def reopen(self) -> None:
        """Replace the socket by a new one."""
        self.close()
        self._failed_at = None
        self.is_connected = False
        self._open()

    def close(self) -> None:
        """Disconnect; messages that were sent are still delivered if a worker is connected."""
        self.socket.disable_monitor()
        self.monitor.close(linger=0)
        self.socket.close(linger=1000 if self.is_connected else 0)

    def poll_events(self) -> tuple[bool, bool]:
        """Return two flags: the worker has connected; it was lost before that, or since."""
        connected = lost = False
        while self.monitor.poll(0):
            if recv_monitor_message(self.monitor)["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                connected = self.is_connected = True
                self._failed_at = None
                continue
            if not self.is_connected:
                self.last_error = "it has other keys, or is not a fastdist worker"
                self._failed_at = self._failed_at or time.monotonic()
            lost, connected = True, False
            self.is_connected = False
        return connected, lost

    @property
    def has_room(self) -> bool:
        """True if the worker should get another call."""
        return len(self.calls) < self._window

    def begin_call(self, number: int, call: Call) -> None:
        """Record a call that is about to be sent."""
        if not self.calls and time.monotonic() - self._ended_at > _SHORT_S:
            self._window = _MIN_WINDOW  # the next calls may be longer
        self.calls[number] = call

    def end_call(self, number: int) -> Call | None:
        """Record the end of a call; None if the call is unknown. Short calls widen the window."""
        call = self.calls.pop(number, None)
        now = time.monotonic()
        is_short = now - self._ended_at < _SHORT_S
        self._window = min(self._window + 1, _MAX_WINDOW) if is_short else _MIN_WINDOW
        self._ended_at = now
        return call

    def mark_lost(self) -> None:
        """Forget the worker's calls and definitions."""
        if self.is_ready:
            self.last_error = "the connection was lost"
        self.is_ready = False
        self.calls.clear()
        self._known.clear()
        self.state_update_number = 0

    def send(self, kind: Kind, number: int = 0, *frames: bytes) -> bool:
        """Send a message; return False if no worker is connected."""
        try:
            self.socket.send_multipart([pack(kind, number), *frames], zmq.NOBLOCK)
            return True
        except zmq.Again:
            return False

    def receive(self) -> Iterator[list[bytes]]:
        """Yield the messages that have arrived."""
        while True:
            try:
                yield self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return

    def define(self, definition: Definition) -> None:
        """Send a definition, and those that it needs, unless the worker has them."""
        if definition.number in self._known:
            return
        for needed in definition.needs:
            self.define(needed)
        self._known.add(definition.number)
        self.send(Kind.DEFINE, definition.number, definition.blob)

    def forget(self, number: int) -> None:
        """Tell the worker to drop a definition."""
        if number in self._known:
            self._known.discard(number)
            self.send(Kind.FORGET, number)
