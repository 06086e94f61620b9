"""The server's socket, and the check of its clients' keys."""

from __future__ import annotations

import ipaddress
from typing import Any
from urllib.parse import SplitResult, urlsplit

import zmq
from zmq.auth.thread import ThreadAuthenticator

from fastdist.ps.wire.keys import Keys, use_server_keys

_HANDSHAKE_MS = 30_000  # connections that say nothing for this time are closed
_STUCK_MS = 10_000  # connections that take nothing for this time too


def require_keys(address: str, keys: Keys | None) -> None:
    """Raise if other machines can reach the address and there are no keys.

    Raises:
        ValueError: the address needs keys.
    """
    if keys is None and not _is_local(address):
        raise ValueError(
            f"{address} can be reached from other machines: pass keys=Keys.make(), and the same "
            "keys to all clients, or listen on tcp://127.0.0.1:*"
        )


def listen(
    context: zmq.Context[Any], address: str, keys: Keys | None, max_frame_bytes: int
) -> zmq.Socket[bytes]:
    """Bind a ROUTER socket.

    Args:
        context: the server's context.
        address: as ZeroMQ names it.
        keys: the job's keys.
        max_frame_bytes: connections that send larger frames are dropped.

    Raises:
        ValueError: the port is invalid.
        zmq.ZMQError: the address cannot be bound.
    """
    _parse(address)
    router: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
    try:
        router.setsockopt(zmq.MAXMSGSIZE, max_frame_bytes)
        router.setsockopt(zmq.LINGER, 0)
        router.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
        router.setsockopt(zmq.TCP_MAXRT, _STUCK_MS)
        router.setsockopt(zmq.ROUTER_HANDOVER, 1)
        if keys is not None:
            use_server_keys(router, keys)
        router.bind(address)
    except BaseException:
        router.close()
        raise
    return router


def start_authenticator(context: zmq.Context[Any], keys: Keys) -> ThreadAuthenticator:
    """Start the check of clients: only the job's client key is accepted."""

    class JobKeyOnly:
        def callback(self, domain: str, key: bytes) -> bool:
            del domain
            return key.decode() == keys.client_public

    authenticator = ThreadAuthenticator(context)
    authenticator.start()
    authenticator.configure_curve_callback(domain="*", credentials_provider=JobKeyOnly())
    return authenticator


def _parse(address: str) -> SplitResult:
    """Parse an address; `*` stands for a free port, which other APIs call 0."""
    parts = urlsplit(f"{address[:-1]}0" if address.endswith(":*") else address)
    try:
        _ = parts.port
    except ValueError as error:
        raise ValueError(f"{address}: {error}") from None
    return parts


def _is_local(address: str) -> bool:
    parts = _parse(address)
    if parts.scheme in ("ipc", "inproc"):
        return True
    host = parts.hostname or ""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
