"""Connections to listeners: made, watched and restored."""

from __future__ import annotations

import os
import select
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from fastdist.link.addresses import begin_to_connect, tune
from fastdist.link.peer import is_own_user
from fastdist.link.secret import connection_key
from fastdist.link.stream import HEARTBEATS, MESSAGES, Place, Stream
from fastdist.link.wake import Wake

_POLL_S = 1.0
_RETRY_S = (0.05, 1.0)  # until the next attempt to connect: at first, and at most
# A listener that refuses a connection closes it immediately, an overloaded one later.
_REFUSAL_S = 1.0
_CONNECT_S = 5.0
_ANSWER_S = 30.0  # to a greeting; a busy worker takes longer, and is greeted again
_BEAT_S = 1.0
_SILENT_S = 10.0


class Connection:
    """A connection that reconnects by itself; `Connections` makes and watches it.

    Attributes:
        is_connected: True if the listener has accepted this connection, and it is not broken.
        was_refused: True if the listener has closed the latest connection instead of accepting it.
        lost_at: when the connection broke or was refused, on the monotonic clock; None while it is
            connected, and before the first one.
        may_begin: False while the connection must not be made.
    """

    def __init__(
        self,
        epoll: select.epoll,
        address: str,
        key: bytes | None,
        purpose: int = MESSAGES,
        *,
        breaks_if_stuck: bool = True,
        place: Place | None = None,
    ) -> None:
        self.address = address
        self.is_connected = self.was_connected = self.was_refused = False
        self.lost_at: float | None = None
        self.may_begin = True
        self._epoll = epoll
        self._breaks_if_stuck = breaks_if_stuck
        self._make_stream = partial(
            Stream, key=key, is_listener=False, purpose=purpose, place=place
        )
        self._stream: Stream | None = None
        self._is_connecting = False  # the stream's socket
        self._process = os.getpid()
        self._began_at = self._sent_at = self._received_at = 0.0
        self._retry_at = 0.0
        self._pause_s = _RETRY_S[0]
        self._has_changed = False
        self._arrived: deque[list[memoryview]] = deque()

    def close(self, linger_s: float = 0.0) -> None:
        """Disconnect; if connected, spend up to `linger_s` seconds on unsent messages."""
        stream = self._stream
        if stream is None:
            return
        if linger_s:
            with suppress(OSError):
                stream.flush_all(linger_s)
        if self._process == os.getpid():
            self._epoll.unregister(stream.socket)  # another process may keep a descriptor of it
        self._sent_at, self._received_at = self.sent_at, self.received_at
        stream.close()
        self._stream = None

    @property
    def descriptor(self) -> int:
        """The socket's descriptor; -1 if there is none."""
        return -1 if self._stream is None else self._stream.socket.fileno()

    @property
    def sent_at(self) -> float:
        """The moment at which bytes of a message were sent last, on the monotonic clock."""
        return max(self._sent_at, self._stream.sent_at if self._stream else 0.0)

    @property
    def received_at(self) -> float:
        """The moment at which bytes of a message were received last."""
        return max(self._received_at, self._stream.received_at if self._stream else 0.0)

    def send(self, header: bytes, frames: Sequence[Any] = ()) -> None:
        """Send a message. It is lost if there is no connection, or if it breaks."""
        if self._stream is None or not self.is_connected:
            return
        try:
            self._stream.send((header, *frames))
            self._stream.watch(self._epoll)
        except OSError:
            self.lose()

    def receive(self) -> Iterator[list[memoryview]]:
        """Yield the messages that have arrived."""
        while self._arrived:
            yield self._arrived.popleft()

    def retry_later(self) -> None:
        """Close the connection; connect again in a second."""
        self._pause_s = _RETRY_S[1]
        self.lose()

    # --- for Connections ------------------------------------------------------------------------

    @property
    def wait_s(self) -> float:
        """Seconds after which `look` has something to do even without events."""
        if self._has_changed or self._arrived:
            return 0.0
        if self._stream is not None or not self.may_begin:
            return _POLL_S
        return max(self._retry_at - time.monotonic(), 0.0)

    def look(self, event: int) -> tuple[bool, bool]:
        """Handle epoll's events; return whether messages came, and whether it was made or lost."""
        try:
            if self._stream is None:
                self._begin_if_due()
            elif event:
                self._talk(self._stream, event)
            elif not self.is_connected:
                patience_s = _CONNECT_S if self._is_connecting else _ANSWER_S
                if time.monotonic() - self._began_at > patience_s:
                    raise TimeoutError  # the next attempt may succeed immediately
        except OSError:
            self.lose()
        except BaseException:  # an interrupt in the middle of a message
            self.lose()
            raise
        has_changed, self._has_changed = self._has_changed, False
        return bool(self._arrived), has_changed

    def _begin_if_due(self) -> None:
        now = time.monotonic()
        if not self.may_begin or now < self._retry_at:
            return
        self._began_at = now
        try:
            begun = begin_to_connect(self.address)
        finally:  # a slow name lookup must not take all the time
            self._pause_s = max(self._pause_s, 4 * (time.monotonic() - now))
        self._epoll.register(begun, select.EPOLLOUT)
        self._is_connecting = True
        self._stream = self._make_stream(begun)

    def _talk(self, stream: Stream, event: int) -> None:
        if self._is_connecting:
            failed = stream.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if failed:
                raise OSError(failed, os.strerror(failed))
            if stream.socket.family == socket.AF_UNIX and not is_own_user(stream.socket):
                self.lose(was_refused=True)  # another user's program, which would hear everything
                return
            tune(stream.socket, breaks_if_stuck=self._breaks_if_stuck)
            self._is_connecting = False
            self._began_at = time.monotonic()
            event = select.EPOLLIN
            self._epoll.modify(stream.socket, event)
        if event & select.EPOLLOUT:
            stream.flush()
        if event & ~select.EPOLLOUT:
            self._hear(stream)
        if stream.is_open and not self.is_connected:
            self.is_connected = self.was_connected = self._has_changed = True
            self.was_refused = False
            self.lost_at = None
            self._pause_s = _RETRY_S[0]
        stream.watch(self._epoll)

    def _hear(self, stream: Stream) -> None:
        while (message := stream.receive()) is not None:
            self._arrived.append(message)

    def lose(self, *, was_refused: bool = False) -> None:
        """Record that the connection is broken, or could not be made."""
        now = time.monotonic()
        is_new = was_refused or (self._stream is not None and not self._is_connecting)
        if self._is_connecting or self._stream is None:  # nobody listens
            self.was_refused = was_refused
        elif is_new and not self.is_connected:
            self.was_refused = was_refused or now - self._began_at < _REFUSAL_S
        self._has_changed |= is_new
        self.is_connected = False
        self.close()
        if self.lost_at is None and (self.was_connected or self.was_refused):
            self.lost_at = now
        self._retry_at = now + self._pause_s
        self._pause_s = min(2 * self._pause_s, _RETRY_S[1])


class _Pulse(Connection):
    """A connection by which a process shows that it runs."""

    def __init__(self, epoll: select.epoll, address: str, key: bytes | None) -> None:
        super().__init__(epoll, address, key, HEARTBEATS)
        self._beat_at: float | None = None  # when the first unanswered beat was sent

    @property
    def is_silent(self) -> bool:
        """True if a beat was not answered for 10 s."""
        return self._beat_at is not None and time.monotonic() - self._beat_at > _SILENT_S

    def beat(self) -> None:
        """Send a byte, which the listener's process sends back."""
        if self._stream is not None and self.is_connected:
            if self._beat_at is None:
                self._beat_at = time.monotonic()
            with suppress(OSError):
                self._stream.socket.send(b"\0")

    def lose(self, *, was_refused: bool = False) -> None:
        self._beat_at = None
        super().lose(was_refused=was_refused)

    def _hear(self, stream: Stream) -> None:
        if not self.is_connected:
            super()._hear(stream)
            return
        with suppress(BlockingIOError):
            if not stream.socket.recv(64):
                raise ConnectionResetError
            self._beat_at = None


class Connections:
    """Connections to several listeners, for one thread.

    Args:
        wake: an event that ends `poll` when it is set.
        has_heartbeats: also detect stopped processes, and do not take busy ones for stopped. The
            listeners must be `Listener(…, breaks_if_stuck=False)`.
        place: the `place` of `Stream`, but it takes the connection's number first.

    Raises what `connection_key` raises.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        wake: Wake | None = None,
        *,
        has_heartbeats: bool = False,
        place: Callable[[int, memoryview, int], list[memoryview] | None] | None = None,
    ) -> None:
        keys = [connection_key(each) for each in addresses]
        self._epoll = select.epoll()
        self._wake = wake
        if wake is not None:
            self._epoll.register(wake.descriptor, select.EPOLLIN)

        def make(number: int) -> Connection:
            return Connection(
                self._epoll,
                addresses[number],
                keys[number],
                breaks_if_stuck=not has_heartbeats,
                place=partial(place, number) if place else None,
            )

        self._make = make
        self._all = [make(number) for number in range(len(addresses))]
        self._spares: dict[int, Connection] = {}  # which are being made
        self._pulses = [
            _Pulse(self._epoll, address, key)
            for address, key in zip(addresses, keys, strict=True)
            if has_heartbeats
        ]
        self._beaten_at = 0.0

    def __getitem__(self, number: int) -> Connection:
        return self._all[number]

    def fileno(self) -> int:
        """Return a descriptor that is readable when `poll` has something to do before it is due."""
        return self._epoll.fileno()

    def close(self, linger_s: float = 0.0) -> None:
        """Disconnect; see `Connection.close`."""
        for connection in (*self._all, *self._pulses, *self._spares.values()):
            connection.close(linger_s)
        self._epoll.close()

    def renew(self, number: int) -> None:
        """Connect once more; the new connection takes the place of the old one when it is made."""
        if number not in self._spares:
            self._spares[number] = self._make(number)

    def poll(self, timeout_s: float = _POLL_S) -> list[tuple[int, bool]]:
        """Wait for messages and events, by default for a second at most.

        Returns the number of each connection to receive from, in the order of the addresses; and
        True if it was made or lost, after these messages have arrived.
        """
        every = (*self._all, *self._pulses, *self._spares.values())
        wait_s = min(max(timeout_s, 0.0), _POLL_S, *(each.wait_s for each in every))
        ready = dict(self._epoll.poll(wait_s))
        if self._wake is not None and self._wake.descriptor in ready:
            self._wake.clear()
        for number, spare in list(self._spares.items()):
            spare.look(ready.pop(spare.descriptor, 0))
            if spare.is_connected:
                self._all[number].close()
                self._all[number] = self._spares.pop(number)
                spare._has_changed = True
        looks = [each.look(ready.get(each.descriptor, 0)) for each in self._all]
        self._feel_pulses(ready)  # last, so that a task's messages from before its end count
        return [(number, look[1]) for number, look in enumerate(looks) if any(look)]

    def _feel_pulses(self, ready: dict[int, int]) -> None:
        now = time.monotonic()
        is_due = now - self._beaten_at >= _BEAT_S
        if is_due:
            self._beaten_at = now
        for pulse, connection in zip(self._pulses, self._all, strict=bool(self._pulses)):
            _, has_changed = pulse.look(ready.get(pulse.descriptor, 0))
            if pulse.is_silent:
                pulse.lose()
            elif is_due:
                pulse.beat()
            connection.may_begin = pulse.is_connected
            if has_changed and not pulse.is_connected:
                connection.lose(was_refused=pulse.was_refused)
