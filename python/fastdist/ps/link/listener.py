"""The socket that connections lead to, and the check of their keys."""

from __future__ import annotations

import errno
import ipaddress
import socket
from typing import Any
from urllib.parse import urlsplit

import zmq
from zmq.auth.thread import ThreadAuthenticator

from fastdist.ps.link.keys import Keys

MAX_FOLDER_BYTES = 90  # of a folder of sockets, whose paths have at most 107
_LINGER_MS = 1000
_STUCK_MS = 10_000  # connections that take nothing for this time are closed
_PROBE_S = 5  # connections that are silent for this time are probed: the machine may be gone


class Listener:
    """A socket that any number of connections lead to.

    Args:
        address: where to listen, as ZeroMQ names it; `*` is a free port.
        keys: the job's keys; only peers that have them are let in. A listener without keys may be
            on this machine's own addresses only.
        max_frame_bytes: connections that send larger frames are dropped; -1 for no limit.
        max_waiting: limit for messages of a connection that wait to be received; 0 for none.

    Attributes:
        context: of the socket.
        socket: gives each message the identity of its connection as a first frame.
        address: the address with the actual port.

    Raises:
        ValueError: the port is invalid, or the address is beyond this machine, and there are no
            keys.
        zmq.ZMQError: the address cannot be bound.
    """

    def __init__(
        self,
        address: str,
        keys: Keys | None,
        *,
        max_frame_bytes: int = -1,
        max_waiting: int = 0,
    ) -> None:
        if not is_local(address) and keys is None:
            raise ValueError(
                f"{address} can be reached from other machines: pass keys=Keys.make(), and the "
                "same keys to all clients, or listen on tcp://127.0.0.1:*"
            )
        self.context = zmq.Context()
        self.socket: zmq.Socket[bytes] = self.context.socket(zmq.ROUTER)
        self._authenticator: Any = None
        for option, value in (
            (zmq.LINGER, _LINGER_MS),
            (zmq.MAXMSGSIZE, max_frame_bytes),
            (zmq.RCVHWM, max_waiting),
            (zmq.TCP_MAXRT, _STUCK_MS),
            (zmq.TCP_KEEPALIVE, 1),
            (zmq.TCP_KEEPALIVE_IDLE, _PROBE_S),
            (zmq.TCP_KEEPALIVE_INTVL, _PROBE_S),
            (zmq.ROUTER_MANDATORY, 1),  # sending tells whether a peer is there
        ):
            self.socket.setsockopt(option, value)
        try:
            if keys is not None:
                self._authenticator = _start_authenticator(self.context, keys)
                self.socket.curve_secretkey = keys.server_secret.encode()
                self.socket.curve_publickey = keys.server_public.encode()
                self.socket.curve_server = True
            _require_free(address)
            self.socket.bind(address)
        except BaseException:
            self.socket.close()
            self.close()
            raise
        self.address: str = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def close(self) -> None:
        """Stop listening: the thread of the socket gets ContextTerminated, and has to close it."""
        if self._authenticator is not None:
            self._authenticator.stop()
        self.context.term()

    def send(self, identity: bytes, *frames: bytes, more: bool = False) -> bool:
        """Send a message, or its first frames.

        Args:
            identity: of the connection.
            frames: the message.
            more: True if further frames follow, which the caller sends.

        Returns:
            False if the peer is gone, or takes nothing.
        """
        try:
            self.socket.send(identity, zmq.SNDMORE | zmq.DONTWAIT)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            return False
        for i, frame in enumerate(frames, 1):
            self.socket.send(frame, zmq.SNDMORE if more or i < len(frames) else 0, copy=False)
        return True


def _require_free(address: str) -> None:
    """Raise if another process listens at a path, which ZeroMQ would take from it."""
    if not address.startswith("ipc:///"):
        return
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1)
        if probe.connect_ex(address.removeprefix("ipc://")) == 0:
            raise zmq.ZMQError(errno.EADDRINUSE, f"another process listens at {address}")


def _start_authenticator(context: zmq.Context[Any], keys: Keys) -> ThreadAuthenticator:
    """Start the check of clients: only the job's client key is accepted."""

    class JobKeyOnly:
        def callback(self, domain: str, key: bytes) -> bool:
            del domain
            return key.decode() == keys.client_public

    authenticator = ThreadAuthenticator(context)
    authenticator.start()
    authenticator.configure_curve_callback(domain="*", credentials_provider=JobKeyOnly())
    return authenticator


def is_local(address: str) -> bool:
    """Return True if only programs of this machine can reach an address.

    Raises:
        ValueError: the port is invalid.
    """
    parts = urlsplit(f"{address[:-1]}0" if address.endswith(":*") else address)  # 0: a free port
    try:
        _ = parts.port
    except ValueError as error:
        raise ValueError(f"{address}: {error}") from None
    if parts.scheme in ("ipc", "inproc"):
        return True
    host = parts.hostname or ""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
