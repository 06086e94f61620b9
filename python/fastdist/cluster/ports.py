"""Ports of this machine that nobody else gets before those whom they are meant for listen there."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager


@contextmanager
def reserved_ports(count: int, host: str = "127.0.0.1") -> Iterator[list[int]]:
    """Free TCP ports, kept while the context is open.

    They are bound, not listened at. Whoever sets SO_REUSEADDR, as nearly every server does, can
    listen there all the same, end, and listen there again.

    Args:
        count: how many.
        host: an IPv4 address of this machine.

    Raises:
        OSError: there are not so many, or the host has no such address.
    """
    with ExitStack() as stack:
        ports = []
        for _ in range(count):
            holder = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            holder.bind((host, 0))
            ports.append(int(holder.getsockname()[1]))
        yield ports
