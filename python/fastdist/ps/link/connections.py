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

from fastdist.ps.link.addresses import begin_to_connect, is_local, tune
from fastdist.ps.link.keys import Keys
from fastdist.ps.link.stream import HEARTBEATS, MESSAGES, Place, Stream, require_cryptography
from fastdist.ps.link.wake import Wake

_POLL_S = 1.0
_RETRY_S = (0.05, 1.0)  # after which time a connection is made again, at first and at last
# A listener that refuses a connection closes it at once, an overloaded one later.
_REFUSAL_S = 1.0
_CONNECT_S = 5.0
_ANSWER_S = 30.0  # to a greeting; a busy worker takes longer, and is greeted again
_BEAT_S = 1.0
_SILENT_S = 10.0


class Connection:
    """A connection that is restored by itself; `Connections` makes and watches it.

    Attributes:
        address: the listener's address.
        is_connected: True if the listener has let this connection in, and it holds.
        was_connected: True once the listener has let it in.
        was_refused: True if the listener has closed the latest connection instead of letting it in.
        lost_at: when the connection broke or was refused, on the monotonic clock; None while it
            holds, and before the first one.
        may_begin: False while the connection must not be made.
    """

    def __init__(
        self,
        epoll: select.epoll,
        address: str,
        keys: Keys | None,
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
        self._keys = keys
        self._purpose = purpose
        self._breaks_if_stuck = breaks_if_stuck
        self._place = place
        self._begun: socket.socket | None = None
        self._stream: Stream | None = None
        self._process = os.getpid()
        self._began_at = self._sent_at = self._received_at = 0.0
        self._retry_at = 0.0
        self._pause_s = _RETRY_S[0]
        self._has_changed = False
        self._arrived: deque[list[memoryview]] = deque()

    def close(self, linger_s: float = 0.0) -> None:
        """Disconnect; messages may still leave for some time if there is a connection."""
        stream, begun = self._stream, self._begun
        if stream is not None and linger_s:
            with suppress(OSError):
                stream.flush_all(linger_s)
        for end in (begun, stream.socket if stream else None):
            if end is not None and self._process == os.getpid():
                self._epoll.unregister(end)  # another process may keep a descriptor of it
        if begun is not None:
            begun.close()
        if stream is not None:
            self._sent_at, self._received_at = self.sent_at, self.received_at
            stream.close()
        self._stream = self._begun = None

    @property
    def descriptor(self) -> int:
        """The socket's descriptor; -1 if there is none."""
        if self._begun is not None:
            return self._begun.fileno()
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
        """Break the connection off; make it again in a second."""
        self._pause_s = _RETRY_S[1]
        self.lose()

    # --- for Connections ------------------------------------------------------------------------

    @property
    def wait_s(self) -> float:
        """Seconds after which `look` has something to do if nothing comes."""
        if self._has_changed or self._arrived:
            return 0.0
        if self.descriptor >= 0 or not self.may_begin:
            return _POLL_S
        return max(self._retry_at - time.monotonic(), 0.0)

    def look(self, event: int) -> tuple[bool, bool]:
        """Take note of what has happened.

        Args:
            event: what epoll tells of the socket.

        Returns:
            True if messages have arrived; True if the connection was made or lost.
        """
        try:
            if self.descriptor < 0:
                self._begin_if_due()
            elif self._begun is not None:
                self._begin_to_talk(event)
            elif event:
                self._talk(event)
            elif not self.is_connected and time.monotonic() - self._began_at > _ANSWER_S:
                raise TimeoutError
        except OSError:
            self.lose()
        except BaseException:  # an interrupt amid what was said
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
            self._begun = begin_to_connect(self.address)
        finally:  # a slow search for a name must not take all the time
            self._pause_s = max(self._pause_s, 4 * (time.monotonic() - now))
        self._epoll.register(self._begun, select.EPOLLOUT)

    def _begin_to_talk(self, event: int) -> None:
        assert self._begun is not None
        if not event:
            if time.monotonic() - self._began_at > _CONNECT_S:
                raise TimeoutError  # the next try may come through at once
            return
        failed = self._begun.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if failed:
            raise OSError(failed, os.strerror(failed))
        tune(self._begun, breaks_if_stuck=self._breaks_if_stuck)
        self._began_at = time.monotonic()
        self._stream = Stream(
            self._begun, self._keys, is_listener=False, purpose=self._purpose, place=self._place
        )
        self._begun = None
        self._epoll.modify(self._stream.socket, select.EPOLLIN)
        self._talk(select.EPOLLIN)

    def _talk(self, event: int) -> None:
        assert self._stream is not None
        if event & select.EPOLLOUT:
            self._stream.flush()
        if event & ~select.EPOLLOUT:
            self._hear(self._stream)
        if self._stream.is_open and not self.is_connected:
            self.is_connected = self.was_connected = self._has_changed = True
            self.was_refused = False
            self.lost_at = None
            self._pause_s = _RETRY_S[0]
        self._stream.watch(self._epoll)

    def _hear(self, stream: Stream) -> None:
        while (message := stream.receive()) is not None:
            self._arrived.append(message)

    def lose(self, *, was_refused: bool = False) -> None:
        """Take note that the connection is broken, or could not be made."""
        now = time.monotonic()
        is_new = self._stream is not None or was_refused
        if is_new and not self.is_connected:
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

    def __init__(self, epoll: select.epoll, address: str, keys: Keys | None) -> None:
        super().__init__(epoll, address, keys, HEARTBEATS)
        self._beat_at: float | None = None  # when the first beat was sent that is not answered

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
        """See `Connection.lose`."""
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
        addresses: the listeners' addresses.
        keys: the job's keys; None if the listeners have no keys.
        wake: ends `poll` when it is set.
        has_heartbeats: also notice processes that are stopped, and take nothing from busy ones for
            a sign: the listeners are `Listener(…, breaks_if_stuck=False)`.
        place: see `Stream`; called with the connection's number first.

    Raises:
        ValueError: an address is none.
        ImportError: there are keys, and cryptography is not installed.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        keys: Keys | None,
        wake: Wake | None = None,
        *,
        has_heartbeats: bool = False,
        place: Callable[[int, memoryview, int], list[memoryview] | None] | None = None,
    ) -> None:
        require_cryptography(keys)
        for each in addresses:
            is_local(each)  # raises if it is none
        self._epoll = select.epoll()
        self._wake = wake
        if wake is not None:
            self._epoll.register(wake.descriptor, select.EPOLLIN)
        self._all = [
            Connection(
                self._epoll,
                each,
                keys,
                breaks_if_stuck=not has_heartbeats,
                place=partial(place, number) if place else None,
            )
            for number, each in enumerate(addresses)
        ]
        self._pulses = [
            _Pulse(self._epoll, each, keys) for each in (addresses if has_heartbeats else ())
        ]
        self._beaten_at = 0.0

    def __getitem__(self, number: int) -> Connection:
        return self._all[number]

    def close(self, linger_s: float = 0.0) -> None:
        """Disconnect; see `Connection.close`."""
        for connection in (*self._all, *self._pulses):
            connection.close(linger_s)
        self._epoll.close()

    def poll(self, timeout_s: float = _POLL_S) -> list[tuple[int, bool]]:
        """Wait for messages and events, a second at most.

        Returns:
            The number of each connection to receive from, in the order of the addresses; and True
            if it was made or lost, after these messages have arrived.
        """
        both = (*self._all, *self._pulses)
        wait_s = min(max(timeout_s, 0.0), _POLL_S, *(each.wait_s for each in both))
        ready = dict(self._epoll.poll(wait_s))
        if self._wake is not None and self._wake.descriptor in ready:
            self._wake.clear()
        looks = [each.look(ready.get(each.descriptor, 0)) for each in self._all]
        self._feel_pulses(ready)  # later: what a task has said before it ended counts
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
