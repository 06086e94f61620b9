"""Connections to listeners: made, watched and restored."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from fastdist.ps.link.keys import Keys

_POLL_S = _REOPEN_S = 1.0
# A listener that refuses a connection closes it at once, an overloaded one later.
_REFUSAL_S = 1.0
_SILENT_MS = 10_000
_OPTIONS = {
    zmq.LINGER: 0,
    zmq.RECONNECT_IVL: 50,
    zmq.RECONNECT_IVL_MAX: 1000,
    # ZeroMQ's network thread answers heartbeats even when the listener's other threads are busy.
    zmq.HEARTBEAT_IVL: 1000,
    zmq.HEARTBEAT_TIMEOUT: _SILENT_MS,
    zmq.TCP_MAXRT: _SILENT_MS,  # of a message that is being sent, which delays heartbeats
    zmq.SNDHWM: 0,  # senders limit what is on its way themselves
    zmq.RCVHWM: 0,
}
_EVENTS = (
    zmq.EVENT_CONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_DISCONNECTED
)
_TRACKED_BYTES = 1 << 20


class Connection:
    """A connection that is restored by itself; `Connections` makes and watches it.

    Attributes:
        address: the listener's address.
        is_connected: True if the listener has let this connection in, and it holds.
        was_connected: True once the listener has let it in.
        was_refused: True if the listener has closed the latest connection instead of letting it in.
        is_restored: True if messages from before the connection was made may be lost.
        lost_at: when the connection broke or was refused, on the monotonic clock; None while it
            holds, and before the first one.
        socket: carries the messages.
        monitor: readable when something has happened to the connection.
    """

    def __init__(
        self, context: zmq.Context[Any], poller: zmq.Poller, address: str, keys: Keys | None
    ) -> None:
        self.address = address
        self.is_connected = self.was_connected = self.was_refused = self.is_restored = False
        self.lost_at: float | None = None
        self._context = context
        self._poller = poller
        self._keys = keys
        self._has_lost = False
        self._began_at = 0.0
        self._reopen_at: float | None = None
        self._open()

    def _open(self) -> None:
        self.socket = self._context.socket(zmq.DEALER)
        for option, value in _OPTIONS.items():
            self.socket.setsockopt(option, value)
        if self._keys is not None:
            self.socket.curve_serverkey = self._keys.server_public.encode()
            self.socket.curve_publickey = self._keys.client_public.encode()
            self.socket.curve_secretkey = self._keys.client_secret.encode()
        self.monitor = self.socket.get_monitor_socket(_EVENTS)
        self.socket.connect(self.address)
        self._poller.register(self.socket, zmq.POLLIN)
        self._poller.register(self.monitor, zmq.POLLIN)

    def close(self, linger_s: float = 0.0) -> None:
        """Disconnect; messages may still be delivered for some time if there is a connection."""
        self._poller.unregister(self.socket)
        self._poller.unregister(self.monitor)
        self.socket.disable_monitor()
        self.monitor.close(linger=0)
        self.socket.close(linger=int(1000 * linger_s) if self.is_connected else 0)

    @property
    def breaks_if_stuck(self) -> bool:
        """True if the connection holds, and breaks when the listener's machine takes nothing."""
        return self.is_connected and not self.address.startswith("ipc:")

    def reopen_soon(self) -> None:
        """Make the connection anew in a second, unless it is restored before.

        ZeroMQ keeps the messages to an unreachable listener, and does not connect again after
        another protocol's answer.
        """
        self._reopen_at = self._reopen_at or time.monotonic() + _REOPEN_S

    def reopen_if_due(self) -> None:
        """Make the connection anew if the time has come."""
        if self._reopen_at is not None and time.monotonic() >= self._reopen_at:
            self.close()
            self.is_connected, self._has_lost, self._reopen_at = False, True, None
            self._open()

    def send(self, header: bytes, frames: Sequence[Any] = ()) -> zmq.MessageTracker | None:
        """Send a message. It is lost if the connection breaks, or cannot be made.

        Returns:
            For a large message, what knows when it is on its way.
        """
        tracker = None
        with suppress(zmq.Again):
            self.socket.send(header, (zmq.SNDMORE if frames else 0) | zmq.DONTWAIT)
            for i, frame in enumerate(frames, 1):
                more = zmq.SNDMORE if i < len(frames) else 0
                is_large = memoryview(frame).nbytes >= _TRACKED_BYTES
                sent = self.socket.send(frame, more, copy=False, track=is_large)
                tracker = sent if is_large else tracker
        return tracker

    def receive(self, *, copy: bool) -> Iterator[list[Any]]:
        """Yield the messages that have arrived: frames of bytes, or without a copy zmq.Frames."""
        with suppress(zmq.Again):
            while True:
                yield self.socket.recv_multipart(zmq.DONTWAIT, copy=copy)

    def poll_events(self) -> bool:
        """Record what has happened; return True if the connection was made or lost."""
        has_changed = False
        while self.monitor.poll(0):
            event = recv_monitor_message(self.monitor)["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.is_connected = self.was_connected = has_changed = True
                self.is_restored = self._has_lost
                self.was_refused = self._has_lost = False
                self.lost_at = self._reopen_at = None
            elif event == zmq.EVENT_DISCONNECTED:
                self._record_loss()
                has_changed = True
            else:  # connected, or refused with a reason, and disconnected at once
                self._began_at = time.monotonic()
        return has_changed

    def _record_loss(self) -> None:
        now = time.monotonic()
        if self.is_connected:
            self._has_lost = True
        else:
            self.was_refused = now - self._began_at < _REFUSAL_S
            self.reopen_soon()
        self.is_connected = False
        if self.lost_at is None and (self.was_connected or self.was_refused):
            self.lost_at = now


class Connections:
    """Connections to several listeners, for one thread.

    Args:
        addresses: the listeners' addresses.
        keys: the job's keys; None if the listeners have no keys.
        wake: an eventfd that ends `poll`, and is read by it.
    """

    def __init__(
        self, addresses: Sequence[str], keys: Keys | None, wake: int | None = None
    ) -> None:
        self._context = zmq.Context()
        # A connection has three sockets, and ZeroMQ closes those of a replaced one later.
        self._context.set(zmq.MAX_SOCKETS, max(1023, 6 * len(addresses) + 64))
        self._poller = zmq.Poller()
        self._wake = wake
        if wake is not None:
            self._poller.register(wake, zmq.POLLIN)
        self._all = [
            Connection(self._context, self._poller, address, keys) for address in addresses
        ]

    def __getitem__(self, number: int) -> Connection:
        return self._all[number]

    def close(self, linger_s: float = 0.0) -> None:
        """Disconnect; see `Connection.close`."""
        for connection in self._all:
            connection.close(linger_s)
        self._context.term()

    def poll(self, timeout_s: float = _POLL_S) -> list[tuple[int, bool]]:
        """Wait for messages and events, a second at most.

        Returns:
            The number of each connection to receive from, in the order of the addresses; and True
            if it was made or lost, after these messages have arrived.
        """
        ready = dict(self._poller.poll(int(1000 * min(max(timeout_s, 0.0), _POLL_S)) + 1))
        if self._wake is not None and self._wake in ready:
            os.eventfd_read(self._wake)
        news = []
        for number, connection in enumerate(self._all):
            has_changed = connection.monitor in ready and connection.poll_events()
            if has_changed or connection.socket in ready:
                news.append((number, has_changed))
            else:
                connection.reopen_if_due()
        return news
