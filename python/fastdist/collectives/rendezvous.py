"""The rendezvous of the ranks of one machine, in which they exchange shared memory.

Rank 0 listens on a Unix socket in Linux's abstract namespace, whose name is derived from the user
and the job: it creates no file, leaves nothing behind, and opens no TCP port. Both ends check that
the other end runs as the same user. Every rank sends a descriptor of its own memory; when all ranks
have arrived, rank 0 sends each rank the descriptors of the others.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass

from fastdist.cluster.launch import Launch
from fastdist.errors import ClusterConfigError

_MAGIC = b"fastdist"
_VERSION = 1
_HELLO = struct.Struct("=8sIII")  # magic, version, rank, world size
_VERDICT = struct.Struct("=I")  # bytes of the refusal that follows; 0: welcome
_MAX_REFUSAL_BYTES = 4096
_FDS_PER_MESSAGE = 128
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


def meet(launch: Launch, generation: int, own_fd: int, timeout_s: float) -> list[int]:
    """Exchange memory with every rank of the job. Every rank must call.

    Args:
        launch: describes this rank; all ranks must be on this machine.
        generation: number of this rendezvous in the job; counts the calls to `fastdist.init`.
        own_fd: descriptor of this rank's memory.
        timeout_s: seconds to wait for all ranks.

    Returns:
        One descriptor per rank, which the caller owns; this rank's descriptor is `own_fd` itself.

    Raises:
        ClusterConfigError: a rank did not arrive in time, arrived twice, or disagrees on the number
            of ranks; raised on all ranks that have arrived.
    """
    deadline = time.monotonic() + timeout_s
    address = _address(f"{launch.job_key}|{generation}")
    meeting = _Meeting(launch.rank, launch.world_size, timeout_s, deadline)
    if launch.rank == 0:
        return _host(meeting, address, own_fd)
    return _join(meeting, address, own_fd)


@dataclass(frozen=True, slots=True)
class _Meeting:
    rank: int
    world_size: int
    timeout_s: float
    deadline: float

    def accept(self, listener: socket.socket) -> socket.socket:
        """Accept the next connection.

        Raises:
            TimeoutError: the deadline has passed.
        """
        while True:
            run_checks()
            left_s = self.deadline - time.monotonic()
            listener.settimeout(max(0.001, min(left_s, _CHECK_S)))
            try:
                return listener.accept()[0]
            except TimeoutError:
                if left_s <= _CHECK_S:
                    raise

    def arm(self, connection: socket.socket) -> None:
        """Set the connection's timeout to the time left until the deadline."""
        connection.settimeout(max(0.001, self.deadline - time.monotonic()))


def _address(key: str) -> str:
    digest = hashlib.sha256(f"{os.getuid()}|{key}".encode()).hexdigest()[:32]
    return f"\0fastdist-{digest}"


def _peer_uid(connection: socket.socket) -> int:
    credentials = connection.getsockopt(
        socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")
    )
    return int(struct.unpack("3i", credentials)[1])


def _host(meeting: _Meeting, address: str, own_fd: int) -> list[int]:
    fds = {0: own_fd}
    connections: dict[int, socket.socket] = {}
    with contextlib.ExitStack() as stack, socket.socket(socket.AF_UNIX) as listener:
        try:
            listener.bind(address)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            raise ClusterConfigError(
                "rank 0 of this job is already waiting for its ranks: two processes were given "
                "RANK 0, or an earlier run of the job has not ended"
            ) from None
        listener.listen(meeting.world_size)
        try:
            while len(fds) < meeting.world_size:
                connection = stack.enter_context(meeting.accept(listener))
                if _peer_uid(connection) != os.getuid():
                    continue
                meeting.arm(connection)
                _welcome(connection, meeting, fds, connections)
        except TimeoutError:
            missing = sorted(set(range(meeting.world_size)) - set(fds))
            refusal = (
                f"rendezvous: ranks {missing} of {meeting.world_size} did not arrive within "
                f"{meeting.timeout_s:g} s"
            )
            _refuse_all(connections, refusal)
            raise ClusterConfigError(refusal, tuple(missing)) from None
        except ClusterConfigError as error:
            _refuse_all(connections, str(error))
            raise
        for rank, connection in connections.items():
            others = [fds[r] for r in range(meeting.world_size) if r != rank]
            try:
                connection.sendall(_VERDICT.pack(0))
                for start in range(0, len(others), _FDS_PER_MESSAGE):
                    socket.send_fds(connection, [b"\0"], others[start : start + _FDS_PER_MESSAGE])
            except OSError:
                raise ClusterConfigError(
                    f"rendezvous: rank {rank} left before all ranks had arrived", (rank,)
                ) from None
    return [fds[rank] for rank in range(meeting.world_size)]


def _welcome(
    connection: socket.socket,
    meeting: _Meeting,
    fds: dict[int, int],
    connections: dict[int, socket.socket],
) -> None:
    data, received, _, _ = socket.recv_fds(connection, _HELLO.size, 1)
    if len(data) != _HELLO.size or len(received) != 1 or data[:8] != _MAGIC:
        for fd in received:
            os.close(fd)
        return  # not a rank of fastdist
    _, version, rank, world_size = _HELLO.unpack(data)
    refusal = ""
    if version != _VERSION:
        refusal = f"rank {rank} uses version {version} of the protocol, expected {_VERSION}"
    elif world_size != meeting.world_size:
        refusal = (
            f"ranks disagree on the number of ranks: rank 0 expects {meeting.world_size}, "
            f"rank {rank} expects {world_size}"
        )
    elif rank in fds or not 0 <= rank < meeting.world_size:
        refusal = f"rank {rank} of {meeting.world_size} arrived twice or is out of range"
    if refusal:
        os.close(received[0])
        _refuse(connection, f"rendezvous: {refusal}")
        raise ClusterConfigError(f"rendezvous: {refusal}", (rank,))
    fds[rank] = received[0]
    connections[rank] = connection


def _refuse(connection: socket.socket, message: str) -> None:
    text = message.encode()[:_MAX_REFUSAL_BYTES]
    with contextlib.suppress(OSError):  # the rank may have exited
        connection.sendall(_VERDICT.pack(len(text)) + text)


def _refuse_all(connections: dict[int, socket.socket], message: str) -> None:
    for connection in connections.values():
        _refuse(connection, message)


def _join(meeting: _Meeting, address: str, own_fd: int) -> list[int]:
    with _connect(meeting, address) as connection:
        meeting.arm(connection)
        hello = _HELLO.pack(_MAGIC, _VERSION, meeting.rank, meeting.world_size)
        socket.send_fds(connection, [hello], [own_fd])
        # Rank 0 has the same deadline, and reports the missing ranks just after it.
        connection.settimeout(connection.gettimeout() + 2.0)  # type: ignore[operator]
        try:
            refusal = _receive(connection, _VERDICT.unpack(_receive(connection, _VERDICT.size))[0])
            if refusal:
                raise ClusterConfigError(refusal.decode(errors="replace"))
            others: list[int] = []
            while len(others) < meeting.world_size - 1:
                data, received, _, _ = socket.recv_fds(connection, 1, _FDS_PER_MESSAGE)
                others.extend(received)
                if not data:
                    raise ConnectionError
        except (TimeoutError, ConnectionError):
            raise ClusterConfigError(
                f"rendezvous: rank 0 left before all {meeting.world_size} ranks had arrived "
                f"(seen from rank {meeting.rank})",
                (0,),
            ) from None
    return [*others[: meeting.rank], own_fd, *others[meeting.rank :]]


def _connect(meeting: _Meeting, address: str) -> socket.socket:
    while True:
        run_checks()
        connection = socket.socket(socket.AF_UNIX)
        try:
            meeting.arm(connection)
            connection.connect(address)
            if _peer_uid(connection) == os.getuid():
                return connection
            problem = "its socket belongs to another user"
        except (ConnectionError, TimeoutError, BlockingIOError):
            problem = "no process listens on its socket"
        connection.close()
        if time.monotonic() >= meeting.deadline:
            raise ClusterConfigError(
                f"rendezvous: rank {meeting.rank} of {meeting.world_size} did not find rank 0 "
                f"within {meeting.timeout_s:g} s: {problem}",
                (0,),
            )
        time.sleep(_RETRY_S)


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
