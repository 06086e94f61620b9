"""Ports of this machine that nobody else gets before those whom they are meant for listen there."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager


def reserve_port(host: str = "127.0.0.1") -> tuple[socket.socket, int]:
    """A free TCP port, and the socket that keeps it until it is closed.

    It is bound, and nobody listens at it. Whoever sets SO_REUSEADDR, as nearly every server does,
    can listen there all the same, end, and listen there again.

    Args:
        host: an IP address of this machine.

    Raises:
        OSError: there is no port, or the host has no such address.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    holder = socket.socket(family, socket.SOCK_STREAM)
    try:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind((host, 0))
    except OSError:
        holder.close()
        raise
    return holder, int(holder.getsockname()[1])


@contextmanager
def reserved_ports(count: int) -> Iterator[list[int]]:
    """Free ports of 127.0.0.1, as by `reserve_port`, while the context is open.

    Raises:
        OSError: there are not so many.
    """
    with ExitStack() as stack:
        ports = []
        for _ in range(count):
            holder, port = reserve_port()
            stack.enter_context(holder)
            ports.append(port)
        yield ports
