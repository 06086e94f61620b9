"""Ports of this machine for servers that tests start."""

import socket

from fastdist.cluster.address import reserve_port

_held: list[socket.socket] = []


def free_port() -> int:
    """Return a port that no other test gets."""
    holder, port = reserve_port()
    _held.append(holder)
    return port
