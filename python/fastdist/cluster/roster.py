"""The roster of an elastic job, in which its launcher keeps who takes part.

A rank that wants the next world asks to join, and how far it has come. When all ranks of the
present world have asked, the roster makes a world of all that wait: those that have come furthest
first. Ranks that have not asked are told to. A rank leaves when its process ends. Once one of a
world has left or asked, the others have as long as ranks wait for each other; then they are killed.
So is, soon, one that others report as late.

A message is a line of JSON with one key.

| from a rank | meaning |
|---|---|
| join: [PROGRESS, SECONDS] | wants the next world; has taken so many steps, and waits so long |
| late: [RANK, ...] | ranks of its world that have not come; []: all that have not asked |
| gather: VALUE | its contribution to a gathering of all ranks of its world |
| finished: true | the job has done its work; nobody joins any more |

| from the roster | meaning |
|---|---|
| anew: true | a rank of this world has ended, or others wait for the next one |
| place: [WORLD, RANK, SIZE] | its rank in a new world |
| gathered: [VALUE, ...] | what all ranks have contributed, by rank |
| ended: true | there is nothing left to do |
"""

from __future__ import annotations

import json
import os
import secrets
import selectors
import signal
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

from fastdist.cluster.launch import ROSTER_VARIABLE
from fastdist.link.peer import is_own_user, peer_pid

_LAST_CALL_S = 30.0
_LATE_S = 5.0  # that a rank has left which others have waited for in vain
_GATHERING_S = 30.0  # that a gathering may take, if ranks wait so long
_PAUSE_S = 0.05
_SEND_S = 1.0  # that a rank may leave a message unread
_MOST_BYTES = 1 << 20  # of a message


@dataclass(frozen=True, slots=True)
class RosterPlace:
    """The socket and slot by which a process joins an elastic job.

    Attributes:
        name: the roster's abstract Unix socket.
        slot: number of the process among those of the launcher; it chooses the GPU.
    """

    name: str
    slot: int

    def environment(self) -> dict[str, str]:
        """Return the variable that tells a process its place."""
        return {ROSTER_VARIABLE: json.dumps(asdict(self))}


def roster_place(environ: Mapping[str, str] = os.environ) -> RosterPlace | None:
    """Return this process's place; None if its job is not elastic."""
    text = environ.get(ROSTER_VARIABLE)
    return None if text is None else RosterPlace(**json.loads(text))


class Line:
    """A connection that carries lines of JSON.

    Args:
        connection: a connected stream socket.
    """

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._received = bytearray()

    def send(self, **message: Any) -> None:
        """Send one message.

        Raises:
            OSError: the other end is gone.
        """
        self.connection.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> list[tuple[str, Any]]:
        """Return the messages that have come, after a wait for bytes as the socket is set.

        Raises:
            EOFError: the other end is gone, or what it sends is no message.
        """
        try:
            data = self.connection.recv(1 << 16)
        except (BlockingIOError, TimeoutError):
            return []
        except ConnectionError:
            data = b""
        self._received += data
        if not data or len(self._received) > _MOST_BYTES:
            raise EOFError
        *lines, rest = bytes(self._received).split(b"\n")
        self._received = bytearray(rest)
        try:
            return [next(iter(json.loads(line).items())) for line in lines]
        except (ValueError, AttributeError, StopIteration):
            raise EOFError from None


@dataclass(slots=True, eq=False)
class _Member:
    """A process that has connected.

    Attributes:
        pid_fd: descriptor that is readable once the process ends; the connection may stay open.
        world: the number of the world of which it is a rank; 0 before the first.
        rank: its rank there.
        progress: its number of commits, while it waits for the next world; None otherwise.
        is_told: True once it was told to ask for the next world.
        ends_s: the time of its kill, unless it asks for the next world before; None: never.
        gathering: its contribution to a gathering that is not complete, in a list; else empty.
    """

    line: Line
    pid_fd: int
    world: int = 0
    rank: int = 0
    progress: int | None = None
    is_told: bool = False
    ends_s: float | None = None
    gathering: list[Any] = field(default_factory=list)


class Roster:
    """Makes the worlds of an elastic job, in a thread.

    Args:
        least: number of ranks below which the job waits for more.
        most: number of ranks that the launcher starts; the first world waits for all of them, or,
            once there are `least`, for half a minute.
    """

    def __init__(self, least: int, most: int) -> None:
        self.name = f"fastdist-roster-{secrets.token_hex(16)}"
        self._least = least
        self._most = most
        self._members: list[_Member] = []  # in the order in which they came
        self._world = 0
        self._size = 0  # of this world
        self._patience_s = 0.0  # that ranks wait for another
        # When the first world begins without those that are missing.
        self._last_call_s: float | None = None
        self._gathered_s: float | None = None  # when the gathering under way takes too long
        self._has_finished = False
        self._selector = selectors.DefaultSelector()
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(f"\0{self.name}")
        self._listener.listen(most)
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._orders, self._taken = socket.socketpair()
        self._is_closed = False
        self._selector.register(self._taken, selectors.EVENT_READ, self._obey)
        self._thread = threading.Thread(target=self._run, name="fastdist roster", daemon=True)
        self._thread.start()

    def __enter__(self) -> Roster:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def has_begun(self) -> bool:
        """Return True once there was a world."""
        return self._world > 0

    def finish(self) -> None:
        """Say that the job has done its work; nobody joins any more."""
        self._orders.send(b"f")

    def close(self) -> None:
        """End the thread, and all connections."""
        self._orders.close()
        self._thread.join()

    def _obey(self) -> None:
        if self._taken.recv(64):
            self._has_finished = True
            for member in self._members:
                member.ends_s = None
        else:
            self._is_closed = True

    def _run(self) -> None:
        self._serve()
        for member in list(self._members):
            self._lose(member)
        for key in list(self._selector.get_map().values()):
            assert isinstance(key.fileobj, socket.socket)
            key.fileobj.close()
        self._selector.close()

    def _serve(self) -> None:
        while not self._is_closed:
            times_s = [member.ends_s for member in self._members]
            times_s += [self._gathered_s, self._last_call_s]
            next_s = min((at_s for at_s in times_s if at_s is not None), default=None)
            wait_s = None if next_s is None else max(0.0, next_s - time.monotonic())
            for key, _ in self._selector.select(wait_s):
                if self._selector.get_map().get(key.fd) is key:  # not forgotten meanwhile
                    key.data()
            self._kill_late()
            self._form()

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:  # no descriptor is left, for example
            time.sleep(_PAUSE_S)
            return
        try:
            if not is_own_user(connection):
                raise PermissionError
            pid_fd = os.pidfd_open(peer_pid(connection))
        except OSError:  # it has ended already, or is another user's
            connection.close()
            return
        connection.settimeout(_SEND_S)
        member = _Member(Line(connection), pid_fd)
        self._members.append(member)
        self._selector.register(connection, selectors.EVENT_READ, lambda: self._receive(member))
        self._selector.register(pid_fd, selectors.EVENT_READ, lambda: self._lose(member))

    def _receive(self, member: _Member) -> None:
        try:
            for kind, value in member.line.receive():
                self._take(member, kind, value)
        except Exception:  # whatever no rank sends
            self._lose(member)

    def _take(self, member: _Member, kind: str, value: Any) -> None:
        if kind == "join":
            progress, self._patience_s = int(value[0]), float(value[1])
            member.progress, member.ends_s, member.gathering = progress, None, []
            if 0 < member.world == self._world:
                self._await_ranks()
        elif kind == "late" and 0 < member.world == self._world:
            self._note_late([int(rank) for rank in value])
        elif kind == "gather":
            member.gathering = [value]
            self._gather()
        elif kind == "finished":
            self._has_finished = True

    def _note_late(self, ranks: list[int]) -> None:
        for member in self._ranks():
            if member.progress is None and (not ranks or member.rank in ranks):
                member.ends_s = member.ends_s or time.monotonic() + _LATE_S

    def _kill_late(self) -> None:
        now_s = time.monotonic()
        late = [m for m in self._members if m.ends_s is not None and m.ends_s <= now_s]
        if self._gathered_s is not None and self._gathered_s <= now_s:
            self._gathered_s = None
            late += [member for member in self._ranks() if not member.gathering]
        for member in late:
            member.ends_s = None
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(member.pid_fd, signal.SIGKILL)

    def _lose(self, member: _Member) -> None:
        if member not in self._members:
            return
        self._members.remove(member)
        self._selector.unregister(member.line.connection)
        self._selector.unregister(member.pid_fd)
        member.line.connection.close()
        os.close(member.pid_fd)
        if member.world == self._world:
            self._await_ranks()

    def _send(self, member: _Member, **message: Any) -> None:
        try:
            member.line.send(**message)
        except TimeoutError:  # it is stopped, and others wait
            member.ends_s = time.monotonic()
        except OSError:  # it has ended, which its other descriptor tells
            pass

    def _ranks(self) -> list[_Member]:
        """Return those that take part in the present world, by rank."""
        ranks = [member for member in self._members if 0 < member.world == self._world]
        return sorted(ranks, key=lambda member: member.rank)

    def _tell_ranks(self) -> list[_Member]:
        """Tell the ranks that have not asked for the next world to do so; return them."""
        missing = [member for member in self._ranks() if member.progress is None]
        for member in missing:
            if not member.is_told:
                member.is_told = True
                self._send(member, anew=True)
        return missing

    def _await_ranks(self) -> None:
        """Tell the same, since this world has lost a rank; kill those that do not ask in time."""
        for member in self._tell_ranks():
            if member.ends_s is None and not self._has_finished:
                member.ends_s = time.monotonic() + self._patience_s + _LATE_S

    def _gather(self) -> None:
        ranks = self._ranks()
        patience_s = min(_GATHERING_S, self._patience_s + _LATE_S)
        self._gathered_s = self._gathered_s or time.monotonic() + patience_s
        if len(ranks) == self._size and all(member.gathering for member in ranks):
            self._gathered_s = None
            values = [member.gathering[0] for member in ranks]
            for member in ranks:
                member.gathering = []
                self._send(member, gathered=values)

    def _form(self) -> None:
        """Make the next world, if all that take part in this one wait for it."""
        waiting = [member for member in self._members if member.progress is not None]
        if self._has_finished:
            for member in [member for member in waiting if not member.world]:
                waiting.remove(member)
                member.progress = None
                self._send(member, ended=True)
        if not waiting:
            return
        if self._tell_ranks() or (len(waiting) < self._least and not self._has_finished):
            return
        if not self._world and len(waiting) < self._most:
            self._last_call_s = self._last_call_s or time.monotonic() + _LAST_CALL_S
            if time.monotonic() < self._last_call_s:
                return
        self._last_call_s = self._gathered_s = None
        self._world += 1
        self._size = len(waiting)
        waiting.sort(key=lambda member: -(member.progress or 0))  # ties keep arrival order
        for rank, member in enumerate(waiting):
            member.world, member.rank = self._world, rank
            member.progress, member.is_told, member.ends_s = None, False, None
            self._send(member, place=[self._world, rank, self._size])
