"""Addresses of tasks: "tcp://host:port" and "ipc://path" of a Unix socket."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
import stat
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

_MOST_PATH_BYTES = 107
MAX_FOLDER_BYTES = 90  # of a folder of sockets
_WAITING = 1024  # connections that have not been accepted
_STUCK_MS = 10_000  # a machine that takes nothing for this time is gone
_PROBE_S = 5  # connections that are silent for this time are probed


def is_path(address: str) -> bool:
    """Return True for a Unix socket, False for TCP; raise ValueError if neither."""
    if _path(address):
        return True
    _host_and_port(address)
    return False


def is_local(address: str) -> bool:
    """Return True if only this machine can reach an address; raise ValueError if it is invalid."""
    return is_path(address) or is_loopback(_host_and_port(address)[0])


def is_loopback(host: str) -> bool:
    """Return True if only this machine can reach a host, by its name or address."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def listen(address: str) -> tuple[socket.socket, str]:
    """Listen at an address: port `*` or 0 is a free port, host `*` is all of this machine's.

    Returns the socket, which does not block, and the address with the actual port. Raises
    ValueError if the address is invalid, OSError if it is in use or not on this machine.
    """
    path = _path(address)
    try:
        if path:
            made = _listen_at_path(path)
        else:
            host, port = _host_and_port(address)
            made = _listen_at(host, port)
            shown = f"[{host}]" if ":" in host else host or "0.0.0.0"
            address = f"tcp://{shown}:{made.getsockname()[1]}"
    except OSError as error:
        raise OSError(error.errno, f"{address}: {error.strerror or error}") from None
    made.setblocking(False)
    return made, address


def _listen_at(host: str, port: int) -> socket.socket:
    if not host and socket.has_dualstack_ipv6():
        try:
            return socket.create_server(
                ("", port), family=socket.AF_INET6, backlog=_WAITING, dualstack_ipv6=True
            )
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE)) from None
    kind, *_, where = _resolved(host, port, socket.AI_PASSIVE)
    return socket.create_server(where, family=kind, backlog=_WAITING)


def _listen_at_path(path: str) -> socket.socket:
    if len(os.fsencode(path)) > _MOST_PATH_BYTES:
        raise OSError(
            errno.ENAMETOOLONG,
            f"the path of a socket has at most {_MOST_PATH_BYTES} bytes: choose another, or set "
            "TMPDIR to a shorter one",
        )
    made = socket.socket(socket.AF_UNIX)
    try:
        with socket.socket(socket.AF_UNIX) as other, suppress(FileNotFoundError, ConnectionError):
            other.settimeout(1)
            other.connect(path)
            raise OSError(errno.EADDRINUSE, "another process listens there")
        with suppress(FileNotFoundError):
            if not stat.S_ISSOCK(os.lstat(path).st_mode):
                raise OSError(errno.EEXIST, "a file that is no socket has this name")
            os.unlink(path)  # left behind by a process that was killed
        made.bind(path)
        made.listen(_WAITING)
    except BaseException:
        made.close()
        raise
    return made


def begin_to_connect(address: str) -> socket.socket:
    """Return a socket that becomes writable once connected; raise OSError if it cannot connect."""
    path = _path(address)
    kind, *_, where = (socket.AF_UNIX, path) if path else _resolved(*_host_and_port(address))
    made = socket.socket(kind)
    try:
        made.setblocking(False)
        failed = made.connect_ex(where)
        if failed not in (0, errno.EINPROGRESS):
            raise OSError(failed, os.strerror(failed))
    except BaseException:
        made.close()
        raise
    return made


def tune(connected: socket.socket, *, breaks_if_stuck: bool) -> None:
    """Set a connection's options; with `breaks_if_stuck`, a peer stuck for 10 s breaks it."""
    connected.setblocking(False)
    if connected.family == socket.AF_UNIX:
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)  # or what is permitted
        return
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _PROBE_S)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_S)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 2)
    if breaks_if_stuck:
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _STUCK_MS)


def _path(address: str) -> str:
    """Return the path of a Unix socket; "" for another address."""
    return address.removeprefix("ipc://") if address.startswith("ipc:///") else ""


def _host_and_port(address: str) -> tuple[str, int]:
    parts = urlsplit(f"{address[:-1]}0" if address.endswith(":*") else address)
    try:
        port = parts.port
    except ValueError as error:
        raise ValueError(f"{address}: {error}") from None
    if parts.scheme != "tcp" or port is None or not parts.hostname:
        raise ValueError(f"{address!r} is no address: expected tcp://HOST:PORT or ipc:///PATH")
    return "" if parts.hostname == "*" else parts.hostname, port


def _resolved(host: str, port: int, flags: int = 0) -> Any:
    found = socket.getaddrinfo(host or None, port, 0, socket.SOCK_STREAM, 0, flags)
    found.sort(key=lambda each: each[0] != socket.AF_INET)
    return found[0]
