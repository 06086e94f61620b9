"""Who may connect to a socket of a job."""

from __future__ import annotations

import ipaddress
from typing import Any
from urllib.parse import urlsplit

import zmq
from zmq.auth.thread import ThreadAuthenticator

from fastdist.ps.keys import Keys


def admit(context: zmq.Context[Any], socket: zmq.Socket[bytes], keys: Keys) -> ThreadAuthenticator:
    """Let in who has the client's key, and nobody else. To be stopped in the end."""

    class OnlyOurs:
        def callback(self, domain: str, key: bytes) -> bool:
            del domain
            return key.decode() == keys.client_public

    authenticator = ThreadAuthenticator(context)
    authenticator.start()
    authenticator.configure_curve_callback(domain="*", credentials_provider=OnlyOurs())
    socket.curve_secretkey = keys.server_secret.encode()
    socket.curve_publickey = keys.server_public.encode()
    socket.curve_server = True
    return authenticator


def present(socket: zmq.Socket[bytes], keys: Keys) -> None:
    """Show the client's key when the socket connects."""
    socket.curve_serverkey = keys.server_public.encode()
    socket.curve_publickey = keys.client_public.encode()
    socket.curve_secretkey = keys.client_secret.encode()


def is_local(address: str) -> bool:
    """Whether a ZeroMQ address can be reached from this machine alone."""
    parts = urlsplit(address.replace("*", "0") if address.endswith("*") else address)
    if parts.scheme in ("ipc", "inproc"):
        return True
    host = parts.hostname or ""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
