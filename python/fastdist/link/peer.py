"""The process at the other end of a Unix socket."""

from __future__ import annotations

import os
import socket
import struct
from contextlib import suppress
from pathlib import Path

_CREDENTIALS = struct.Struct("3i")  # process, user and group


def peer_pid(connection: socket.socket) -> int:
    """Return the id of the process that has connected, or that listens."""
    return _credentials(connection)[0]


def peer_user(connection: socket.socket) -> int:
    """Return the user of the process at the other end."""
    return _credentials(connection)[1]


def is_own_user(connection: socket.socket) -> bool:
    """Return True if the process at the other end runs as the same user.

    Inside a user namespace the kernel shows all users from outside as one number, often that of
    nobody. A process of this number must be in the same namespace.
    """
    pid, user, _ = _credentials(connection)
    return user == os.getuid() and (user != _number_of_others() or _shares_namespace(pid))


def _number_of_others() -> int | None:
    """Return the number of users from outside this namespace, None if there are none."""
    try:
        map_of_users = Path("/proc/self/uid_map").read_text().split()
        if map_of_users == ["0", "0", "4294967295"]:  # the machine's own namespace
            return None
        return int(Path("/proc/sys/kernel/overflowuid").read_text())
    except (OSError, ValueError):
        return 65534


def _shares_namespace(pid: int) -> bool:
    with suppress(OSError):
        own = os.readlink("/proc/self/ns/user")
        return os.readlink(f"/proc/{pid}/ns/user") == own
    return False


def _credentials(connection: socket.socket) -> tuple[int, ...]:
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return _CREDENTIALS.unpack(raw)
