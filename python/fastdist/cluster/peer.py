"""The process at the other end of a Unix socket."""

from __future__ import annotations

import os
import socket
import struct

_CREDENTIALS = struct.Struct("3i")  # process, user and group


def peer_pid(connection: socket.socket) -> int:
    """Return the id of the process that has connected, or that listens."""
    return _credentials(connection)[0]


def peer_user(connection: socket.socket) -> int:
    """Return the user of the process at the other end."""
    return _credentials(connection)[1]


def is_own_user(connection: socket.socket) -> bool:
    """Return True if the process at the other end runs as the same user."""
    return peer_user(connection) == os.getuid()


def _credentials(connection: socket.socket) -> tuple[int, ...]:
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return _CREDENTIALS.unpack(raw)
