"""The socket at which the ranks of one machine talk to the roster of their elastic job."""

from __future__ import annotations

import json
import os
import secrets
import selectors
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from fastdist.link.peer import is_own_user, peer_pid

_PAUSE_S = 0.05
_SEND_S = 1.0  # that a rank may leave a message unread
MOST_BYTES = 1 << 20
"""Limit for a message."""


class Line:
    """A connection that carries lines of JSON."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._received = bytearray()

    def send(self, **message: Any) -> None:
        """Send one message."""
        self.connection.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> list[tuple[str, Any]]:
        """Return the messages that have come, after a wait for bytes as the socket is set."""
        try:
            data = self.connection.recv(1 << 16)
        except (BlockingIOError, TimeoutError):
            return []
        except ConnectionError:
            data = b""
        self._received += data
        if not data or len(self._received) > MOST_BYTES:
            raise EOFError
        *lines, rest = bytes(self._received).split(b"\n")
        self._received = bytearray(rest)
        try:
            return [next(iter(json.loads(line).items())) for line in lines]
        except (ValueError, AttributeError, StopIteration):
            raise EOFError from None


class RankDoor:
    """Lets in the ranks of this machine, and hears them, in a thread.

    Args:
        most: number of ranks that the launcher starts.
        on_said: a function to call with a rank's number here, and the message's key and value.
        on_left: a function to call with the number of a rank that has left, or has sent what no
            rank sends, and whether its process has ended; if not, once more when it has.

    Attributes:
        name: the abstract Unix socket.
        selector: the selector of the thread, which calls the data of the keys it returns.
    """

    def __init__(
        self,
        most: int,
        on_said: Callable[[int, str, Any], None],
        on_left: Callable[[int, bool], None],
    ) -> None:
        self.name = f"fastdist-roster-{secrets.token_hex(16)}"
        self.selector = selectors.DefaultSelector()
        self._on_said = on_said
        self._on_left = on_left
        # Each with a descriptor that is readable once its process ends, before its connection ends
        # if another process has that too, or after; and with the process.
        self._ranks: dict[int, tuple[Line, int, int]] = {}
        self._count = 0
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(f"\0{self.name}")
        self._listener.listen(most)
        self._listener.setblocking(False)
        self.selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._calls: deque[Callable[[], None]] = deque()
        self._bell, self._heard = socket.socketpair()
        self.selector.register(self._heard, selectors.EVENT_READ, self._make_calls)
        self._is_closed = False

    def serve(
        self, wait_s: Callable[[], float | None], look: Callable[[], None], end: Callable[[], None]
    ) -> None:
        """Begin the thread, which calls `look` after each wait for events, and `end` at its end."""

        def run() -> None:
            while not self._is_closed:
                for key, _ in self.selector.select(wait_s()):
                    if self.selector.get_map().get(key.fd) is key:  # not forgotten meanwhile
                        key.data()
                look()
            for number in list(self._ranks):
                self._forget(number)
            self._listener.close()
            end()
            self._heard.close()
            self.selector.close()

        self.thread = threading.Thread(target=run, name="fastdist roster", daemon=True)
        self.thread.start()

    def call(self, function: Callable[[], None]) -> None:
        """Call a function in the thread, from another one."""
        self._calls.append(function)
        self._bell.send(b"!")

    def close(self) -> None:
        """End the thread, and all connections."""
        self._bell.close()
        self.thread.join()

    def _make_calls(self) -> None:
        self._is_closed = not self._heard.recv(64)
        while self._calls:
            self._calls.popleft()()

    def send(self, number: int, message: dict[str, Any]) -> None:
        """Send a rank a message; kill it if it leaves that unread, since others wait."""
        try:
            self._ranks[number][0].send(**message)
        except TimeoutError:
            self.kill(number)
        except (OSError, KeyError):  # it has ended, which its other descriptor tells
            pass

    def kill(self, number: int) -> None:
        """Kill a rank, if it has not ended."""
        with suppress(ProcessLookupError, KeyError):
            signal.pidfd_send_signal(self._ranks[number][1], signal.SIGKILL)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:  # no descriptor is left, for example
            time.sleep(_PAUSE_S)
            return
        try:
            if not is_own_user(connection):
                raise PermissionError
            pid = peer_pid(connection)
            pid_fd = os.pidfd_open(pid)
        except OSError:  # it has ended already, or is another user's
            connection.close()
            return
        connection.settimeout(_SEND_S)
        for other, (line, _, other_pid) in list(self._ranks.items()):
            if other_pid == pid and line.connection.fileno() < 0:
                self._end(other)  # it has left, and is back
        self._count += 1
        number = self._count
        self._ranks[number] = Line(connection), pid_fd, pid
        self.selector.register(connection, selectors.EVENT_READ, lambda: self._receive(number))
        self.selector.register(pid_fd, selectors.EVENT_READ, lambda: self._end(number))

    def _receive(self, number: int) -> None:
        try:
            for kind, value in self._ranks[number][0].receive():
                self._on_said(number, kind, value)
        except Exception:  # whatever no rank sends
            self._hang_up(self._ranks[number][0])
            self._on_left(number, False)

    def _end(self, number: int) -> None:
        self._forget(number)
        self._on_left(number, True)

    def _forget(self, number: int) -> None:
        line, pid_fd, _ = self._ranks.pop(number)
        self._hang_up(line)
        self.selector.unregister(pid_fd)
        os.close(pid_fd)

    def _hang_up(self, line: Line) -> None:
        if line.connection.fileno() >= 0:
            self.selector.unregister(line.connection)
            line.connection.close()
