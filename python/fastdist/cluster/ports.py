"""Reserves free ports until the intended task binds them."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager


def reserve_port(host: str = "127.0.0.1") -> tuple[socket.socket, int]:
    """Reserve a free TCP port; return the socket that reserves it until closed, and the port.

    The socket is bound but does not listen. A server that sets SO_REUSEADDR, as nearly every server
    does, can listen at the port, end, and listen again.
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
    """Reserve free ports of 127.0.0.1 with `reserve_port` until the context is closed."""
    with ExitStack() as stack:
        ports = []
        for _ in range(count):
            holder, port = reserve_port()
            stack.enter_context(holder)
            ports.append(port)
        yield ports
