"""The socket that accepts connections."""

from __future__ import annotations

import itertools
import math
import os
import select
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import fastdist._core as _core
from fastdist.link.addresses import listen, tune
from fastdist.link.peer import is_own_user, peer_user
from fastdist.link.secret import connection_key
from fastdist.link.stream import HEARTBEATS, Room, Stream, Upload
from fastdist.link.wake import Wake

T = TypeVar("T")

_MAX_STRANGERS = 256  # unproven connections; above this, the oldest is closed
_LINGER_S = 1.0
_STUCK_S = 10.0
# What is received of a message that waits for room: so that TCP and the sender's timeouts see bytes
# move. TCP opens its window for this much at once.
_TRICKLE_BYTES = 1 << 20
_TRICKLE_S = 3.0
_PAUSE_S = 0.2  # without accepting, after accepting has failed


class Listener:
    """A socket that accepts any number of connections. For one thread, except `wake`.

    Args:
        max_frame_bytes: connections that send larger frames are dropped.
        max_arriving_bytes: the limit of the memory for messages of more than 4 MiB that are
            arriving; further ones wait. A connection that keeps others waiting, and sends nothing
            for 10 s, is dropped.
        breaks_if_stuck: drop connections whose peer takes nothing for 10 s.
        on_drop: a function to call with the number of a connection that is lost.

    Raises what `connection_key` raises, and OSError if another process listens there, or the
    address is not this machine's.
    """

    def __init__(
        self,
        address: str,
        *,
        max_frame_bytes: float = math.inf,
        max_arriving_bytes: float = math.inf,
        breaks_if_stuck: bool = True,
        on_drop: Callable[[int], None] | None = None,
    ) -> None:
        self._key = connection_key(address)
        self._socket, self.address = listen(address)
        self._max_frame_bytes = max_frame_bytes
        self._room = Room(max_arriving_bytes)
        self._trickled_at = 0.0
        self._breaks_if_stuck = breaks_if_stuck
        self._on_drop = on_drop
        self._numbers = itertools.count(1)
        self._streams: dict[int, Stream] = {}
        self._strangers: dict[int, None] = {}
        self._by_descriptor: dict[int, int] = {}
        self._ready: dict[int, None] = {}  # connections with received bytes, in order
        self._ahead: dict[int, None] = {}  # connections with unreturned bytes
        self._accepts_at = 0.0  # 0: now
        self._wake = Wake()
        self._epoll = select.epoll()
        self._epoll.register(self._socket, select.EPOLLIN)
        self._epoll.register(self._wake.descriptor, select.EPOLLIN)

    def fileno(self) -> int:
        """Return a descriptor that is readable when `receive` has something to do."""
        return self._epoll.fileno()

    def wake(self) -> None:
        """Make `receive` return None; from any thread."""
        self._wake.set()

    def close(self) -> None:
        """Stop listening; spend up to a second on unsent messages."""
        end_s = time.monotonic() + _LINGER_S
        for number in list(self._streams):
            self._try(number, lambda stream: stream.flush_all(end_s - time.monotonic()))
        for stream in self._streams.values():
            stream.close()
        if self._socket.family == socket.AF_UNIX:
            Path(self._socket.getsockname()).unlink(missing_ok=True)
        self._socket.close()
        self._epoll.close()
        self._wake.close()

    def receive(self, timeout_s: float | None = None) -> tuple[int, list[memoryview]] | None:
        """Return the next message: the number of its connection, and its frames.

        Returns None after the timeout, and after `wake`.
        """
        end_s = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            while self._ready:
                number = next(iter(self._ready))
                del self._ready[number]
                message = self._try(number, self._receive_from)
                if message is not None:
                    return number, message
            wait_s = None if end_s is None else max(end_s - time.monotonic(), 0.0)
            is_woken = self._poll(0.0 if self._ahead else wait_s)
            if is_woken or (wait_s == 0.0 and not self._ready):
                return None

    def _poll(self, wait_s: float | None) -> bool:
        """Wait for events; return True after `wake`."""
        is_woken = False
        if self._accepts_at:
            wait_s = _PAUSE_S if wait_s is None else min(wait_s, _PAUSE_S)
        if self._room.waiting:
            wait_s = _TRICKLE_S if wait_s is None else min(wait_s, _TRICKLE_S)
        events = self._epoll.poll(wait_s)
        if self._accepts_at and time.monotonic() >= self._accepts_at:
            self._accepts_at = 0.0
            self._epoll.modify(self._socket, select.EPOLLIN)
        for descriptor, event in events:
            number = self._by_descriptor.get(descriptor)
            if descriptor == self._socket.fileno():
                self._accept()
            elif descriptor == self._wake.descriptor:
                self._wake.clear()
                is_woken = True
            elif number is not None:
                is_broken = event & (select.EPOLLHUP | select.EPOLLERR)
                if is_broken and self._streams[number].allowance == 0:
                    self.drop(number)  # else the event would come again at once
                    continue
                if event & ~select.EPOLLIN:
                    self._try(number, self._flush)  # which drops a broken one
                if event & ~select.EPOLLOUT:
                    self._ready[number] = None
        self._ready |= self._ahead
        self._ahead.clear()
        if self._room.waiting:
            self._look_at_room()
        return is_woken

    def send(self, number: int, *frames: Any, waits: bool = False) -> Upload | None:
        """Send what the socket takes now, and the rest in `receive`; with `waits`, send all of it.

        Returns the `Upload`, which tells when the frames may change; None if the peer is gone.
        """

        def send(stream: Stream) -> Upload:
            upload = stream.send(frames)
            if waits:
                stream.flush_all(_STUCK_S)
            self._watch(stream)
            return upload

        return self._try(number, send)

    def _receive_from(self, stream: Stream) -> list[memoryview] | None:
        if stream.is_choked:
            return None
        was_open = stream.is_open
        message = stream.receive()
        self._watch(stream)
        self._let_in()
        if stream.is_open and not was_open:
            number = self._by_descriptor[stream.socket.fileno()]
            del self._strangers[number]
            if stream.purpose == HEARTBEATS:
                _core.echo(os.dup(stream.socket.fileno()))
                self.drop(number)
        return message

    def _flush(self, stream: Stream) -> None:
        stream.flush()
        self._watch(stream)

    def _watch(self, stream: Stream) -> None:
        hears = not stream.is_choked and stream.allowance > 0
        stream.watch(self._epoll, hears=hears)
        if stream.has_ahead and hears:
            self._ahead[self._by_descriptor[stream.socket.fileno()]] = None

    def _let_in(self) -> None:
        """Receive messages that have waited for memory, if there is enough now."""
        while (stream := self._room.let_in()) is not None:
            stream.received_at = time.monotonic()  # until now it was this end that waited
            self._allow(stream, math.inf)

    def _allow(self, stream: Stream, nbytes: float) -> None:
        stream.allowance = nbytes
        self._ready[self._by_descriptor[stream.socket.fileno()]] = None

    def _look_at_room(self) -> None:
        """Drop connections that keep others waiting and send nothing; let the others trickle."""
        now = time.monotonic()
        for stream in list(self._room.inside):
            number = self._by_descriptor[stream.socket.fileno()]
            if number not in self._ready and now - stream.received_at > _STUCK_S:
                self.drop(number)
        if now - self._trickled_at > _TRICKLE_S:
            self._trickled_at = now
            for stream in self._room.waiting:
                self._allow(stream, _TRICKLE_BYTES)

    def _accept(self) -> None:
        try:
            accepted, _ = self._socket.accept()
        except BlockingIOError:
            return
        except OSError:  # the peer has left, or this process has too many open files
            self._epoll.modify(self._socket, 0)
            self._accepts_at = time.monotonic() + _PAUSE_S
            return
        try:
            is_unix = accepted.family == socket.AF_UNIX
            if is_unix and not is_own_user(accepted) and peer_user(accepted) != 0:
                raise ConnectionRefusedError
            tune(accepted, breaks_if_stuck=self._breaks_if_stuck)
        except OSError:
            accepted.close()
            return
        number = next(self._numbers)
        self._streams[number] = Stream(
            accepted,
            self._key,
            is_listener=True,
            max_frame_bytes=self._max_frame_bytes,
            room=self._room,
        )
        self._by_descriptor[accepted.fileno()] = number
        self._epoll.register(accepted, select.EPOLLIN)
        self._strangers[number] = None
        if len(self._strangers) > _MAX_STRANGERS:
            self.drop(next(iter(self._strangers)))

    def _try(self, number: int, call: Callable[[Stream], T]) -> T | None:
        """Call a function with a connection; drop the connection if it is broken."""
        stream = self._streams.get(number)
        if stream is None:
            return None
        try:
            return call(stream)
        except OSError:
            self.drop(number)
            return None

    def drop(self, number: int) -> None:
        """Close a connection, if it is not lost."""
        stream = self._streams.pop(number, None)
        if stream is None:
            return
        self._strangers.pop(number, None)
        del self._by_descriptor[stream.socket.fileno()]
        self._epoll.unregister(stream.socket)  # another process may keep a descriptor of it
        stream.close()
        self._let_in()
        if self._on_drop is not None:
            self._on_drop(number)
