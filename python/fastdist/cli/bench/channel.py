"""Messages between the bench and its ranks: one JSON object per line over a Unix socket.

An idle rank blocks in `receive` and takes no processor time from the engine that is measured.
"""

from __future__ import annotations

import json
import socket
from typing import Any

Message = dict[str, Any]

_READ_BYTES = 1 << 20


class ChannelClosedError(Exception):
    """The other end closed the connection."""


class Channel:
    """One end of a connection; owns its socket.

    Methods raise ChannelClosedError if the connection was closed.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._pending = bytearray()
        self.fileno = connection.fileno  # for `selectors`
        self.close = connection.close

    def send(self, message: Message) -> None:
        """Send one message."""
        try:
            self._socket.sendall(json.dumps(message, separators=(",", ":")).encode() + b"\n")
        except OSError as error:
            raise ChannelClosedError(str(error)) from error

    def receive(self) -> Message:
        """Wait for the next message."""
        while (message := self.take()) is None:
            self.read()
        return message

    def take(self) -> Message | None:
        """Return the next complete message of the data read so far, or None; never wait."""
        line, newline, rest = self._pending.partition(b"\n")
        if not newline:
            return None
        self._pending = rest
        message: Message = json.loads(line)
        return message

    def read(self) -> None:
        """Read once; wait for at least one byte."""
        try:
            data = self._socket.recv(_READ_BYTES)
        except OSError as error:
            raise ChannelClosedError(str(error)) from error
        if not data:
            raise ChannelClosedError("the connection was closed")
        self._pending += data
