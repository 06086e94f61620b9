"""A client's connection to one server, and whether it holds."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from fastdist.ps.wire.access import present
from fastdist.ps.wire.keys import Keys

_RECONNECT_MS, _MAX_RECONNECT_MS = 50, 1000
# A server's own thread answers heartbeats, whatever the others do.
_HEARTBEAT_MS, _SILENT_MS = 2000, 10_000


class Connection:
    """ZeroMQ connects again by itself; here it is noted since when there is no connection.

    Args:
        context: of the client.
        address: of the server.
        keys: of the job, where the server has keys.

    Attributes:
        socket: carries requests and replies.
        monitor: readable when `take_events` has something to do.
        was_there: whether the server has ever let this client in.
        lost_at: when a connection that there was has ended, on the monotonic clock; None while
            there is one, and before the first.
    """

    def __init__(self, context: zmq.Context[Any], address: str, keys: Keys | None) -> None:
        self.address = address
        self.was_there = False
        self.lost_at: float | None = None
        self.socket = context.socket(zmq.DEALER)
        for option, value in (
            (zmq.LINGER, 0),
            (zmq.RECONNECT_IVL, _RECONNECT_MS),
            (zmq.RECONNECT_IVL_MAX, _MAX_RECONNECT_MS),
            (zmq.HEARTBEAT_IVL, _HEARTBEAT_MS),
            (zmq.HEARTBEAT_TIMEOUT, _SILENT_MS),
        ):
            self.socket.setsockopt(option, value)
        if keys is not None:
            present(self.socket, keys)
        self.monitor = self.socket.get_monitor_socket(
            zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED
        )
        self.socket.connect(address)

    def close(self) -> None:
        """Disconnect."""
        self.socket.disable_monitor()
        self.monitor.close()
        self.socket.close()

    def send(self, header: bytes, frames: Sequence[Any]) -> None:
        """Send a message, or drop it where the queue of a server that is not there is full."""
        try:
            self.socket.send(header, (zmq.SNDMORE if frames else 0) | zmq.DONTWAIT)
            for i, frame in enumerate(frames, 1):
                more = zmq.SNDMORE if i < len(frames) else 0
                self.socket.send(frame, more | zmq.DONTWAIT, copy=False)
        except zmq.Again:
            pass

    def take_events(self) -> bool:
        """Note what has happened to the connection; whether it is there again."""
        is_back = False
        while self.monitor.poll(0):
            if recv_monitor_message(self.monitor)["event"] == zmq.EVENT_DISCONNECTED:
                self.lost_at = time.monotonic() if self.lost_at is None else self.lost_at
                is_back = False
            else:
                is_back = self.lost_at is not None
                self.lost_at = None
                self.was_there = True
        return is_back
