"""The rendezvous of the ranks of one machine, in which they exchange shared memory.

Rank 0 listens on a Unix socket in Linux's abstract namespace: it creates no file, leaves nothing
behind, and opens no TCP port. The name of the socket is derived from the user and the job, and ends
with a random number, so that no other user can take it first; ranks find it in the kernel's list of
sockets. Both ends check that the other end runs as the same user. Every rank sends a descriptor of
its own memory; when all ranks have arrived, rank 0 sends each rank the descriptors of the others.

Ranks that meet again, or other processes with the same key, use the same name: who connects to a
socket whose meeting is over tries again.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from fastdist.errors import ClusterConfigError
from fastdist.link.peer import is_own_user

_MAGIC = b"fastdist"
_VERSION = 4
_HELLO = struct.Struct("=8sIII")  # magic, version, rank, world size
_ARRIVED = b"+"  # rank 0's answer: the rank has arrived, or hears why not
_VERDICT = struct.Struct("=I")  # bytes of the refusal that follows; 0: welcome
_MAX_REFUSAL_BYTES = 1 << 16
_FDS_PER_MESSAGE = 128
# Connections, beside those of ranks, that may wait before they say which rank they are.
_MAX_SILENT = 64
_SOCKETS = "/proc/self/net/unix"
_LISTENS = b"00010000"
_RETRY_S = 0.01
_CHECK_S = 0.1

_checks: list[Callable[[], None]] = []


def check_while_waiting(check: Callable[[], None]) -> None:
    """Register a function to call repeatedly while ranks wait; an exception ends the wait."""
    _checks.append(check)


def run_checks() -> None:
    """Call the functions that `check_while_waiting` registered."""
    for check in _checks:
        check()


def exchange_memory(job_key: str, rank: int, size: int, own_fd: int, timeout_s: float) -> list[int]:
    """Exchange memory with every rank, all of which are on this machine. Every rank must call.

    Returns:
        One descriptor per rank, which the caller owns; this rank's descriptor is `own_fd` itself.

    Raises:
        ClusterConfigError: a rank did not arrive in time, arrived twice, or disagrees on the number
            of ranks; raised on all ranks that have arrived.
    """
    deadline = time.monotonic() + timeout_s
    rendezvous = _Rendezvous(rank, size, timeout_s, deadline, prefix_of(job_key))
    if rank == 0:
        return _host(rendezvous, own_fd)
    return _join(rendezvous, own_fd)


def prefix_of(job_key: str) -> str:
    """Return the beginning of the names of rank 0's socket."""
    digest = hashlib.sha256(f"{os.getuid()}|{job_key}".encode()).hexdigest()
    return f"\0fastdist-{digest[:32]}-"


@dataclass(frozen=True, slots=True)
class _Rendezvous:
    rank: int
    world_size: int
    timeout_s: float
    deadline: float
    prefix: str  # of the names of rank 0's socket

    def arm(self, connection: socket.socket) -> None:
        """Set the connection's timeout to the time left until the deadline."""
        connection.settimeout(max(0.001, self.deadline - time.monotonic()))

    def send_fds(self, connection: socket.socket, fds: list[int], data: bytes = b"\0") -> None:
        """Send descriptors with data; wait while too many of this user have not been received."""
        while True:
            try:
                socket.send_fds(connection, [data], fds)
                return
            except OSError as error:
                if error.errno != errno.ETOOMANYREFS or time.monotonic() > self.deadline:
                    raise
            time.sleep(_RETRY_S)

    def connections(self, but: str = "") -> Iterator[socket.socket | None]:
        """Connect to each process that listens for this rendezvous; None for another user's."""
        for name in _names(self.prefix):
            if name == but:
                continue
            connection = socket.socket(socket.AF_UNIX)
            connection.setblocking(False)  # another user's process might not accept
            try:
                connection.connect(name)
                is_own = is_own_user(connection)
            except OSError:
                connection.close()
                continue
            if is_own:
                yield connection
            else:
                connection.close()
                yield None


def _names(prefix: str) -> list[str]:
    """Return the names of listening sockets that begin with `prefix`."""
    start = prefix.replace("\0", "@").encode()
    with open(_SOCKETS, "rb") as file:
        lines = [line.split() for line in file if start in line]
    return [
        fields[7].decode(errors="replace").replace("@", "\0", 1)
        for fields in lines
        if len(fields) == 8 and fields[3] == _LISTENS and fields[7].startswith(start)
    ]


def _host(rendezvous: _Rendezvous, own_fd: int) -> list[int]:
    guests = _Guests(rendezvous, own_fd)
    try:
        guests.await_all()
        for rank, connection in guests.connections.items():
            others = [guests.fds[r] for r in range(rendezvous.world_size) if r != rank]
            rendezvous.arm(connection)
            try:
                connection.sendall(_VERDICT.pack(0))
                for start in range(0, len(others), _FDS_PER_MESSAGE):
                    rendezvous.send_fds(connection, others[start : start + _FDS_PER_MESSAGE])
            except OSError:
                raise _left(rank) from None
    except BaseException as error:
        if isinstance(error, ClusterConfigError):
            for connection in guests.connections.values():
                _refuse(connection, error)
        for rank in guests.connections:
            os.close(guests.fds[rank])
        raise
    finally:
        guests.close()
    return [guests.fds[rank] for rank in range(rendezvous.world_size)]


def _left(rank: int) -> ClusterConfigError:
    return ClusterConfigError(f"rendezvous: rank {rank} left before all ranks had arrived", (rank,))


class _Guests:
    """The ranks that have arrived at rank 0, and connections that have not said their rank.

    Attributes:
        fds: descriptor of each rank's memory.
        connections: the connection to each rank but 0.
    """

    def __init__(self, rendezvous: _Rendezvous, own_fd: int) -> None:
        self._rendezvous = rendezvous
        self.fds = {0: own_fd}
        self.connections: dict[int, socket.socket] = {}
        self._silent: list[socket.socket] = []  # the oldest first
        self._selector = selectors.DefaultSelector()
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)
        name = rendezvous.prefix + secrets.token_hex(8)
        self._listener.bind(name)
        self._listener.listen(rendezvous.world_size + _MAX_SILENT)
        for other in rendezvous.connections(but=name):
            if other is not None:
                other.close()
                self.close()
                raise ClusterConfigError(
                    "rank 0 of this job is already waiting for its ranks: two processes were given "
                    "RANK 0, or an earlier run of the job has not ended"
                )

    def await_all(self) -> None:
        size = self._rendezvous.world_size
        while len(self.fds) < size:
            run_checks()
            left_s = self._rendezvous.deadline - time.monotonic()
            if left_s <= 0:
                missing = sorted(set(range(size)) - set(self.fds))
                raise ClusterConfigError(
                    f"rendezvous: ranks {missing} of {size} did not arrive within "
                    f"{self._rendezvous.timeout_s:g} s",
                    tuple(missing),
                )
            for key, _ in self._selector.select(min(left_s, _CHECK_S)):
                connection = key.fileobj
                assert isinstance(connection, socket.socket)
                if connection is self._listener:
                    self._accept()
                elif key.data is not None:  # an arrived rank says nothing more
                    raise _left(key.data)
                elif connection in self._silent:
                    self._silent.remove(connection)
                    self._selector.unregister(connection)
                    self._welcome(connection)

    def _accept(self) -> None:
        try:
            connection = self._listener.accept()[0]
        except (BlockingIOError, ConnectionError):
            return
        except OSError as error:
            raise ClusterConfigError(
                f"rendezvous: rank 0 cannot accept another rank ({error.strerror}): see ulimit -n",
                (0,),
            ) from None
        if not is_own_user(connection):
            connection.close()
            return
        connection.setblocking(False)
        self._selector.register(connection, selectors.EVENT_READ)
        self._silent.append(connection)
        if len(self._silent) > self._rendezvous.world_size + _MAX_SILENT:
            oldest = self._silent.pop(0)
            self._selector.unregister(oldest)
            oldest.close()

    def _welcome(self, connection: socket.socket) -> None:
        """Read what a connection says; close it unless it is a rank."""
        try:
            data, received, _, _ = socket.recv_fds(connection, _HELLO.size, 1)
        except OSError:
            data, received = b"", []
        if len(data) != _HELLO.size or len(received) != 1 or data[:8] != _MAGIC:
            for fd in received:
                os.close(fd)
            connection.close()
            return
        _, version, rank, world_size = _HELLO.unpack(data)
        expected = self._rendezvous.world_size
        refusal = ""
        if version != _VERSION:
            refusal = f"rank {rank} uses version {version} of the protocol, expected {_VERSION}"
        elif world_size != expected:
            refusal = (
                f"ranks disagree on the number of ranks: rank 0 expects {expected}, "
                f"rank {rank} expects {world_size}"
            )
        elif rank in self.fds or not 0 <= rank < expected:
            refusal = f"rank {rank} of {expected} arrived twice or is out of range"
        with contextlib.suppress(OSError):  # told when its connection is used
            connection.sendall(_ARRIVED)
        if refusal:
            os.close(received[0])
            error = ClusterConfigError(f"rendezvous: {refusal}", (rank,))
            with connection:
                _refuse(connection, error)
            raise error
        self.fds[rank] = received[0]
        self.connections[rank] = connection
        self._selector.register(connection, selectors.EVENT_READ, rank)

    def close(self) -> None:
        self._selector.close()
        for connection in (self._listener, *self._silent, *self.connections.values()):
            connection.close()


def _refuse(connection: socket.socket, error: ClusterConfigError) -> None:
    """Tell a rank why the rendezvous has failed."""
    text = json.dumps([str(error), error.ranks]).encode()
    with contextlib.suppress(OSError):  # the rank may have exited
        connection.settimeout(1.0)
        connection.sendall(_VERDICT.pack(len(text)) + text)


def _join(rendezvous: _Rendezvous, own_fd: int) -> list[int]:
    others: list[int] = []
    with _arrive(rendezvous, own_fd) as connection:
        try:
            # Rank 0 has begun to wait before now, and reports the missing ranks at its deadline.
            connection.settimeout(rendezvous.timeout_s + 2.0)
            refusal = _receive(connection, _VERDICT.unpack(_receive(connection, _VERDICT.size))[0])
            if refusal:
                message, ranks = json.loads(refusal)
                raise ClusterConfigError(message, tuple(ranks))
            while len(others) < rendezvous.world_size - 1:
                others += _receive_fds(connection, rendezvous.rank)
        except BaseException as error:
            for fd in others:
                os.close(fd)
            if not isinstance(error, OSError):
                raise
            raise ClusterConfigError(
                f"rendezvous: rank 0 left before all {rendezvous.world_size} ranks had arrived "
                f"(seen from rank {rendezvous.rank})",
                (0,),
            ) from None
    return [*others[: rendezvous.rank], own_fd, *others[rendezvous.rank :]]


def _arrive(rendezvous: _Rendezvous, own_fd: int) -> socket.socket:
    """Connect to rank 0 and say which rank this is; again if its meeting was another."""
    hello = _HELLO.pack(_MAGIC, _VERSION, rendezvous.rank, rendezvous.world_size)
    while True:
        run_checks()
        problem = "no process listens on its socket"
        for connection in rendezvous.connections():
            if connection is None:
                problem = "its socket belongs to another user"
                continue
            rendezvous.arm(connection)
            problem = "the process that listens on its socket does not answer"
            with contextlib.suppress(OSError):
                rendezvous.send_fds(connection, [own_fd], hello)
                if connection.recv(1) == _ARRIVED:
                    return connection
            connection.close()
        if time.monotonic() >= rendezvous.deadline:
            raise ClusterConfigError(
                f"rendezvous: rank {rendezvous.rank} of {rendezvous.world_size} did not find "
                f"rank 0 within {rendezvous.timeout_s:g} s: {problem}",
                (0,),
            )
        time.sleep(_RETRY_S)


def _receive_fds(connection: socket.socket, rank: int) -> list[int]:
    data, received, flags, _ = socket.recv_fds(connection, 1, _FDS_PER_MESSAGE)
    if flags & socket.MSG_CTRUNC:
        for fd in received:
            os.close(fd)
        raise ClusterConfigError(
            f"rendezvous: rank {rank} cannot open a file for each rank: see ulimit -n", (rank,)
        )
    if not data:
        raise ConnectionError
    return received


def _receive(connection: socket.socket, size: int) -> bytes:
    if size > _MAX_REFUSAL_BYTES:
        raise ConnectionError
    data = b""
    while len(data) < size:
        part = connection.recv(size - len(data))
        if not part:
            raise ConnectionError
        data += part
    return data
