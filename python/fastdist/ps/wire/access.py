"""The keys of both ends of a connection."""

from __future__ import annotations

import zmq

from fastdist.ps.wire.keys import Keys


def guard(socket: zmq.Socket[bytes], keys: Keys) -> None:
    """Let a socket that listens show the server's key; who may come in, `admit` says."""
    socket.curve_secretkey = keys.server_secret.encode()
    socket.curve_publickey = keys.server_public.encode()
    socket.curve_server = True


def present(socket: zmq.Socket[bytes], keys: Keys) -> None:
    """Let a socket show the client's key when it connects."""
    socket.curve_serverkey = keys.server_public.encode()
    socket.curve_publickey = keys.client_public.encode()
    socket.curve_secretkey = keys.client_secret.encode()
