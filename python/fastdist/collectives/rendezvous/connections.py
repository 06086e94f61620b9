"""TCP connections between the ranks of several machines.

Each rank connects to all lower ranks. On every connection the two ranks prove to each other that
both have the key of their communicator:

    the rank that connects    HELLO: its rank, the purpose of the connection, a random number
    the rank that accepts     CHALLENGE: a random number, and a proof
    the rank that connects    a proof
    the rank that accepts     WELCOME

A proof is the HMAC-SHA256 of everything that both have said and of their ranks, so that nobody can
use it on another connection. The rank that connects is the first to know that it has reached its
peer, but keeps the connection only after WELCOME.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import os
import secrets
import select
import socket
import struct
import time
from collections.abc import Callable, Generator, Sequence
from typing import Any

from fastdist.collectives.rendezvous.local import run_checks
from fastdist.errors import CollectiveTimeoutError, PeerFailureError

Address = tuple[str, int]
"""IP address and port."""

OUT, IN, STREAM = range(3)
"""Purposes of a connection, as the rank that connects sees them: its sends and the peer's answers;
the peer's sends and its answers; collectives."""

_CHECK_S = 0.05
_RETRY_S = 0.2
_MAX_STRANGERS = 64  # connections, beside those of ranks, that may wait for their proof
_OUTAGE_MS = 600_000  # that a connection survives
_HELLO = struct.Struct("<8sII16s")
_CHALLENGE = struct.Struct("<16s32s")
_MAGIC = b"fastdist"
_WELCOME = b"\1"
_CONNECTS, _ACCEPTS = range(2)
# Errors that may pass: of the network, or of a rank that closes connections of too many strangers.
_PASSING = {
    *(errno.ECONNRESET, errno.EPIPE, errno.EHOSTUNREACH, errno.EHOSTDOWN),
    *(errno.ENETUNREACH, errno.ENETDOWN, errno.ETIMEDOUT),
}

_Steps = Generator[None, None, None]  # of a handshake; it yields while its socket is not ready


def listen_at(ip: str) -> socket.socket:
    """Listen at a free port of a numeric IP address."""
    family, address = _resolve((ip, 0))
    listener = socket.socket(family)
    try:
        listener.bind(address)
        listener.listen(socket.SOMAXCONN)
    except OSError as error:
        listener.close()
        raise OSError(error.errno, f"cannot listen at {ip}: {error.strerror}") from None
    listener.setblocking(False)
    return listener


def connect_ranks(
    listener: socket.socket,
    rank: int,
    machines: Sequence[int],
    addresses: Sequence[Address],
    key: bytes,
    timeout_s: float,
    check: Callable[[], None],
) -> list[list[socket.socket | None]]:
    """Connect this rank to all others, whose listeners are at `addresses`. Every rank must call.

    The key is secret to processes that are not of the job. `check` is called repeatedly, and raises
    an exception if a rank is lost.

    Returns:
        The connections OUT, IN and STREAM by rank, as this rank sees them. There is no STREAM
        between ranks of one machine.

    Raises:
        CollectiveTimeoutError: ranks have not connected in time.
        PeerFailureError: a rank has left, or another program answers in its place.
        OSError: no file descriptor is left.
    """
    meeting = _Meeting(listener, rank, machines, addresses, key)
    try:
        meeting.run(time.monotonic() + timeout_s, check)
    except BaseException:
        for connection in filter(None, (each for own in meeting.found for each in own)):
            connection.close()
        raise
    finally:
        meeting.close()
    return meeting.found


class _Meeting:
    """The connections of a rank that are made, and those that are on the way."""

    def __init__(
        self,
        listener: socket.socket,
        rank: int,
        machines: Sequence[int],
        addresses: Sequence[Address],
        key: bytes,
    ) -> None:
        self._listener = listener
        self._rank = rank
        self._addresses = addresses
        self._resolved = [self._resolve(other) for other in range(rank)]
        self._key = key
        self._purposes = [STREAM if each == machines[rank] else STREAM + 1 for each in machines]
        self._purposes[rank] = 0
        self.found: list[list[socket.socket | None]] = [[None] * 3 for _ in machines]
        self._outages: dict[int, str] = {}  # the last error of connecting to a rank
        # Not epoll, in which a closed connection stays while a forked child has it too.
        self._poll = select.poll()
        self._poll.register(listener, select.POLLIN)
        # Handshakes by the file descriptor of their sockets, the oldest first.
        self._ours: dict[int, tuple[socket.socket, _Steps]] = {}
        self._strangers: dict[int, tuple[socket.socket, _Steps]] = {}
        self._waiting: list[tuple[float, int, int]] = []  # time to connect again, rank, purpose

    def run(self, deadline: float, check: Callable[[], None]) -> None:
        """Connect to all ranks; see `connect_ranks`."""
        for other in range(self._rank):
            for purpose in range(self._purposes[other]):
                self._begin(other, purpose)
        next_check = 0.0
        while self._missing():
            ready = self._poll.poll(1000 * _CHECK_S)
            for fd, _ in ready:
                handshakes = self._ours if fd in self._ours else self._strangers
                if fd == self._listener.fileno():
                    self._accept()
                elif fd in handshakes and next(handshakes[fd][1], True):  # it has ended
                    del handshakes[fd]
            now = time.monotonic()
            if now < next_check and ready:
                continue
            next_check = now + _CHECK_S
            run_checks()
            check()
            for again in [each for each in self._waiting if each[0] <= now]:
                self._waiting.remove(again)
                self._begin(*again[1:])
            if self._missing():
                self._check_found()
            if now > deadline:
                self._raise_late()

    def close(self) -> None:
        """Close all connections that are not made."""
        for connection, _ in self._ours.values():
            connection.close()
        self._close_strangers(0)

    def _missing(self) -> list[int]:
        return [rank for rank, most in enumerate(self._purposes) if None in self.found[rank][:most]]

    # --- as the rank that connects --------------------------------------------------------------

    def _begin(self, rank: int, purpose: int) -> None:
        family, address = self._resolved[rank]
        try:
            connection = socket.socket(family)
        except OSError as error:
            text = "cannot open a connection to another rank; see ulimit -n"
            raise OSError(error.errno, text) from None
        connection.setblocking(False)
        _set_options(connection, purpose)
        steps = self._introduce(connection, rank, purpose)
        self._poll.register(connection, select.POLLOUT)
        failed = connection.connect_ex(address)
        if failed not in (0, errno.EINPROGRESS):
            self._fail(connection, rank, purpose, failed)
            return
        self._ours[connection.fileno()] = connection, steps

    def _introduce(self, connection: socket.socket, rank: int, purpose: int) -> _Steps:
        """Prove to a lower rank who this is, and keep the connection."""
        try:
            error = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if error:
                raise OSError(error, os.strerror(error))
            self._poll.modify(connection, select.POLLIN)
            hello = _HELLO.pack(_MAGIC, self._rank, purpose, secrets.token_bytes(16))
            _say(connection, hello)
            challenge = yield from _hear(connection, _CHALLENGE.size)
            nonce, proof = _CHALLENGE.unpack(challenge)
            if not hmac.compare_digest(proof, self._proof(_ACCEPTS, rank, hello, nonce)):
                raise PeerFailureError(
                    f"rank {self._rank} found another program than rank {rank} of its job at "
                    f"{self._endpoint(rank)}",
                    (rank,),
                )
            _say(connection, self._proof(_CONNECTS, rank, hello, nonce))
            yield from _hear(connection, len(_WELCOME))
        except OSError as error:
            self._fail(connection, rank, purpose, error.errno or errno.ECONNRESET)
        else:
            self._keep(connection, rank, purpose)

    def _fail(self, connection: socket.socket, rank: int, purpose: int, error: int) -> None:
        """Try again later if the error may pass: a cable may be unplugged briefly."""
        self._close(connection)
        self._outages[rank] = os.strerror(error)
        if error not in _PASSING:
            raise PeerFailureError(
                f"rank {self._rank} cannot connect to rank {rank} at {self._endpoint(rank)}: "
                f"{os.strerror(error)}",
                (rank,),
            )
        self._waiting.append((time.monotonic() + _RETRY_S, rank, purpose))

    # --- as the rank that accepts ---------------------------------------------------------------

    def _accept(self) -> None:
        """Accept as many connections as ranks may open, and some of strangers."""
        most = sum(self._purposes) + _MAX_STRANGERS
        for _ in range(most):
            try:
                connection, _ = self._listener.accept()
            except OSError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE):
                    return
                if not self._strangers:
                    text = "cannot accept another rank; see ulimit -n"
                    raise OSError(error.errno, text) from None
                self._close_strangers(0)
                continue
            connection.setblocking(False)
            self._poll.register(connection, select.POLLIN)
            self._strangers[connection.fileno()] = connection, self._welcome(connection)
            self._close_strangers(most)

    def _welcome(self, connection: socket.socket) -> _Steps:
        """Keep the connection of a process if it proves that it is a higher rank."""
        try:
            hello = yield from _hear(connection, _HELLO.size)
            magic, rank, purpose, _ = _HELLO.unpack(hello)
            is_rank = self._rank < rank < len(self._purposes) and purpose < self._purposes[rank]
            if magic != _MAGIC or not is_rank:
                raise ConnectionError
            nonce = secrets.token_bytes(16)
            _say(connection, nonce + self._proof(_ACCEPTS, self._rank, hello, nonce))
            expected = self._proof(_CONNECTS, self._rank, hello, nonce)
            proof = yield from _hear(connection, len(expected))
            if not hmac.compare_digest(proof, expected):
                raise ConnectionError
            _set_options(connection, purpose)
            _say(connection, _WELCOME)
        except OSError:
            self._close(connection)
        else:
            self._keep(connection, rank, (IN, OUT, STREAM)[purpose])

    def _close_strangers(self, kept: int) -> None:
        """Close all but the latest `kept` connections of strangers; ranks connect again."""
        for fd in list(self._strangers)[: max(0, len(self._strangers) - kept)]:
            self._close(self._strangers.pop(fd)[0])

    # --- as both --------------------------------------------------------------------------------

    def _close(self, connection: socket.socket) -> None:
        self._poll.unregister(connection)
        connection.close()

    def _proof(self, side: int, acceptor: int, hello: bytes, nonce: bytes) -> bytes:
        said = struct.pack("<II", side, acceptor) + hello + nonce
        return hmac.digest(self._key, said, "sha256")

    def _keep(self, connection: socket.socket, rank: int, purpose: int) -> None:
        self._poll.unregister(connection)
        earlier = self.found[rank][purpose]
        if earlier is not None:  # the connection was lost, and made again
            earlier.close()
        self.found[rank][purpose] = connection

    def _check_found(self) -> None:
        """Raise PeerFailureError if a connected rank has left.

        A rank that fails during the rendezvous closes its connections without a message. One that
        has connected to all may already have closed the communicator; it sends a message first,
        which concerns later calls.
        """
        for rank, own in enumerate(self.found):
            connection = own[OUT]
            if connection is not None and _has_ended(connection):
                raise PeerFailureError(f"rank {rank} has left while the ranks connected", (rank,))

    def _raise_late(self) -> None:
        ranks = self._missing()
        outages = {rank: f": {outage}" for rank, outage in self._outages.items()}
        names = [f"{rank} ({self._addresses[rank][0]}{outages.get(rank, '')})" for rank in ranks]
        raise CollectiveTimeoutError(
            f"rank {self._rank} at {self._addresses[self._rank][0]} could not connect in time to "
            f"rank {', '.join(names)}; has it died, or is a firewall between the machines?",
            tuple(ranks),
        )

    def _resolve(self, rank: int) -> tuple[int, Any]:
        try:
            return _resolve(self._addresses[rank])
        except OSError:
            raise PeerFailureError(
                f"rank {self._rank} has no way to {self._endpoint(rank)} of rank {rank}", (rank,)
            ) from None

    def _endpoint(self, rank: int) -> str:
        ip, port = self._addresses[rank]
        return f"{ip} port {port}"


def _resolve(address: Address) -> tuple[int, Any]:
    numeric = socket.AI_NUMERICHOST | socket.AI_NUMERICSERV
    found = socket.getaddrinfo(*address, type=socket.SOCK_STREAM, flags=numeric)
    return found[0][0], found[0][4]


def _set_options(connection: socket.socket, purpose: int) -> None:
    """Send immediately; probe the idle peer of a stream each second, to notice a cut cable."""
    options = [(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)]
    if purpose == STREAM:
        options += [
            (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1),
            (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1),
            (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _OUTAGE_MS),
            (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
        ]
    for option in options:
        with contextlib.suppress(OSError):  # sandboxes lack some
            connection.setsockopt(*option)


def _say(connection: socket.socket, message: bytes) -> None:
    if connection.send(message) != len(message):  # an empty buffer takes so few bytes whole
        raise ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET))


def _hear(connection: socket.socket, size: int) -> Generator[None, None, bytes]:
    message = b""
    while len(message) < size:
        try:
            part = connection.recv(size - len(message))
        except BlockingIOError:
            yield
            continue
        if not part:
            raise ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET))
        message += part
    return message


def _has_ended(connection: socket.socket) -> bool:
    """Return True if the peer has closed a connection, or it has failed."""
    try:
        return not connection.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        return True
