"""A client's connection to one server, and its state."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from fastdist.ps.wire.keys import Keys, use_client_keys

_RECONNECT_MS, _MAX_RECONNECT_MS = 50, 1000
# ZeroMQ's network thread answers heartbeats even when the server's other threads are busy.
_HEARTBEAT_MS, _SILENT_MS = 2000, 10_000
# A server that refuses a client closes the connection at once, an overloaded one later.
_REFUSAL_S = 1.0
_TRACKED_BYTES = 1 << 20
_HANDSHAKE_FAILURES = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


class Connection:
    """A connection that ZeroMQ restores by itself; records since when it is broken.

    Args:
        context: the client's context.
        address: the server's address.
        keys: the job's keys, if the server has keys.

    Attributes:
        socket: carries requests and replies.
        monitor: readable when `poll_events` has events.
        was_connected: True once the server has let this client in.
        was_refused: True if the server has closed the latest connection instead of letting this
            client in.
        lost_at: when the connection broke or was refused, on the monotonic clock; None while it
            holds, and before the first one.
    """

    def __init__(self, context: zmq.Context[Any], address: str, keys: Keys | None) -> None:
        self.address = address
        self.was_connected = False
        self.was_refused = False
        self._began_at = 0.0
        self.lost_at: float | None = None
        self.socket = context.socket(zmq.DEALER)
        for option, value in (
            (zmq.LINGER, 0),
            (zmq.RECONNECT_IVL, _RECONNECT_MS),
            (zmq.RECONNECT_IVL_MAX, _MAX_RECONNECT_MS),
            (zmq.HEARTBEAT_IVL, _HEARTBEAT_MS),
            (zmq.HEARTBEAT_TIMEOUT, _SILENT_MS),
            (zmq.TCP_MAXRT, _SILENT_MS),  # of a message that is being sent, which delays heartbeats
        ):
            self.socket.setsockopt(option, value)
        if keys is not None:
            use_client_keys(self.socket, keys)
        self.monitor = self.socket.get_monitor_socket(
            zmq.EVENT_CONNECTED
            | zmq.EVENT_DISCONNECTED
            | zmq.EVENT_HANDSHAKE_SUCCEEDED
            | _HANDSHAKE_FAILURES
        )
        self.socket.connect(address)

    def close(self) -> None:
        """Disconnect."""
        self.socket.disable_monitor()
        self.monitor.close()
        self.socket.close()

    def send(self, header: bytes, frames: Sequence[Any]) -> tuple[bool, zmq.MessageTracker | None]:
        """Send a message; drop it if the queue of an unreachable server is full.

        Returns:
            False if the message was dropped; for a large message, what knows when it is on its way.
        """
        tracker = None
        try:
            self.socket.send(header, (zmq.SNDMORE if frames else 0) | zmq.DONTWAIT)
            for i, frame in enumerate(frames, 1):
                more = zmq.SNDMORE if i < len(frames) else 0
                is_large = memoryview(frame).nbytes >= _TRACKED_BYTES
                sent = self.socket.send(frame, more | zmq.DONTWAIT, copy=False, track=is_large)
                tracker = sent if is_large else tracker
        except zmq.Again:
            return False, None
        return True, tracker

    def poll_events(self) -> bool:
        """Record events of the connection; return True if it was restored."""
        is_back = False
        while self.monitor.poll(0):
            event = recv_monitor_message(self.monitor)["event"]
            now = time.monotonic()
            if event == zmq.EVENT_CONNECTED:
                self._began_at = now
            elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                is_back = self.lost_at is not None
                self.lost_at = None
                self.was_connected, self.was_refused = True, False
            elif event == zmq.EVENT_DISCONNECTED:
                if self.lost_at is None and (self.was_connected or self.was_refused):
                    self.lost_at = now
                is_back = False
            else:
                is_early = now - self._began_at < _REFUSAL_S
                self.was_refused = is_early or event != zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
        return is_back
