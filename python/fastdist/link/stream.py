"""Messages of several frames over a socket that never blocks."""

from __future__ import annotations

import math
import os
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from fastdist.link.sealing import Cipher

MAX_FRAMES = 6
_PREFIX = struct.Struct(f"<{MAX_FRAMES + 1}Q")  # the number of frames, and their sizes
_GREETING = struct.Struct("<8s?B")  # the sender's magic, whether there is a key, the purpose
_MAGICS = b"FDLINK1>", b"FDLINK1<"  # of the end that connects, and of the listener
_AHEAD_BYTES = 64 << 10
_RECORD_BYTES = 256 << 10
_MOST_UNSENT = 1000  # messages
_SMALL_BYTES = 4 << 20  # of messages that wait for no room
_LENGTH = struct.Struct("<I")
TAG_BYTES = 16

MESSAGES, HEARTBEATS = 0, 1  # purposes of connections
NO_MEMORY = memoryview(b"")  # takes the place of a frame that was received and lost

Place = Callable[[memoryview, int], "list[memoryview] | None"]
_Reading = Generator[None, None, None]


def _memory(nbytes: int) -> memoryview:
    """Return uninitialized memory for so many bytes; pages are allocated on first use."""
    try:
        return np.empty(nbytes, np.uint8).data
    except (MemoryError, ValueError):
        raise ConnectionAbortedError(f"no memory for {nbytes} bytes") from None


def require_whole(frames: Sequence[memoryview], what: str) -> None:
    """Raise MemoryError if there was no memory for a frame of a message."""
    if any(frame is NO_MEMORY for frame in frames):
        raise MemoryError(f"no memory for the frames of {what}")


class Upload:
    """A message that is sent from the caller's memory."""

    def __init__(self, parts: Iterable[memoryview]) -> None:
        self.parts = deque(parts)  # what is not sent

    @property
    def done(self) -> bool:
        """True if the message is sent, so that its memory may change."""
        return not self.parts

    def copy(self) -> None:
        """Copy the unsent rest, so that the caller's memory may change now."""
        self.parts = deque(memoryview(bytes(part)) for part in self.parts)


class Room:
    """Limits the memory for messages that are arriving at a listener.

    Beyond the limit, messages wait in their order. A message larger than it arrives alone.
    """

    def __init__(self, nbytes: float) -> None:
        self.inside: dict[Stream, int] = {}  # sizes of the messages that connections are receiving
        self.waiting: dict[Stream, int] = {}  # and of those that will be received, in order
        self._free = nbytes

    def enter(self, who: Stream, nbytes: int) -> bool:
        """Take memory for a message; return False if it must wait."""
        self.waiting[who] = nbytes
        return len(self.waiting) == 1 and self.let_in() is not None

    def let_in(self) -> Stream | None:
        """Take memory, if there is enough, for the message that has waited the longest.

        Returns its connection; None if no message is let in.
        """
        who = next(iter(self.waiting), None)
        if who is None or (self.inside and self.waiting[who] > self._free):
            return None
        self.inside[who] = self.waiting.pop(who)
        self._free -= self.inside[who]
        return who

    def leave(self, who: Stream) -> None:
        """Release a connection's memory, or its place among those that wait."""
        self.waiting.pop(who, None)
        self._free += self.inside.pop(who, 0)


class Stream:
    """Messages of several frames over a socket that never blocks.

    Args:
        key: 32 bytes; only a peer that has them may send more than a greeting. None: any peer may,
            and nothing is encrypted.
        is_listener: True if the peer has connected to this end.
        place: a function that takes the first frame of a message of two, and the size of the
            second. It may return memory for the second frame, which the message then lacks.
        room: the memory for large messages, which connections share.

    Attributes:
        purpose: the purpose of the connection; a listener learns it when the stream is open.
        is_open: True once the peer has greeted, and has proved that it has the key.
        sent_at: the time at which bytes of a message were last sent, on the monotonic clock.
        received_at: the time at which bytes of a message were last received.
        allowance: the bytes of a large message that may be received now; 0 while it waits for room.
    """

    def __init__(
        self,
        connected: socket.socket,
        key: bytes | None,
        *,
        is_listener: bool,
        purpose: int = MESSAGES,
        max_frame_bytes: float = math.inf,
        place: Place | None = None,
        room: Room | None = None,
    ) -> None:
        self.socket = connected
        self._process = os.getpid()
        self.purpose = purpose
        self.is_open = False
        self._watched = select.EPOLLIN
        self.sent_at = self.received_at = 0.0
        self.allowance = math.inf
        self._is_sending = False
        self._max_frame_bytes = max_frame_bytes
        self._place = place
        self._shared_room = room
        self._unsent: deque[Upload] = deque()
        self._way_out: Cipher | None = None
        self._way_in: Cipher | None = None
        self._sealed = memoryview(b"")  # the part of a record that is not sent yet
        self._ahead = _memory(_AHEAD_BYTES)
        self._read = self._filled = 0  # positions in `_ahead`
        self._opened = memoryview(b"")  # the part of a record that is not read yet
        self._message: list[memoryview] | None = None
        self._reading = self._read_all(key, is_listener)

    def close(self) -> None:
        """Close the connection."""
        self.socket.close()
        self._reading.close()
        if self._shared_room is not None:
            self._shared_room.leave(self)
        for upload in self._unsent:
            upload.parts.clear()  # the memory is no longer read
        self._unsent.clear()

    # --- sending --------------------------------------------------------------------------------

    def send(self, frames: Sequence[Any]) -> Upload:
        """Send what the socket takes now, and the rest in `flush`."""
        views = [memoryview(frame) for frame in frames]
        sizes = [view.nbytes for view in views]
        prefix = _PREFIX.pack(len(sizes), *sizes, *[0] * (MAX_FRAMES - len(sizes)))
        whole = (view.cast("B") for view in views if view.nbytes)
        return self._send([memoryview(prefix), *whole])

    def _send(self, parts: Sequence[memoryview]) -> Upload:
        upload = Upload(parts)
        self._unsent.append(upload)
        self.flush()
        return upload

    @property
    def is_choked(self) -> bool:
        """True if too many messages are unsent; until they are, do not receive from the peer."""
        return len(self._unsent) > _MOST_UNSENT

    @property
    def is_flushed(self) -> bool:
        """True if nothing waits to be sent."""
        return not self._unsent and not self._sealed

    def watch(self, epoll: select.epoll, *, hears: bool = True) -> None:
        """Set the events that an epoll, where the socket is registered, waits for."""
        events = select.EPOLLIN if hears else 0
        events |= 0 if self.is_flushed else select.EPOLLOUT
        if events != self._watched:
            self._watched = events
            epoll.modify(self.socket, events)

    def flush(self) -> None:
        """Send what the socket takes now; raise OSError if the connection is broken."""
        if self._process != os.getpid():  # whose records would have the numbers of this one's
            raise ConnectionAbortedError("the connection is another process's")
        if self._is_sending:  # after an interrupt it is unknown how much was sent
            raise ConnectionAbortedError("interrupted while it was sending")
        while not self.is_flushed:
            if self._way_out is not None and not self._sealed:
                self._seal(self._way_out)
            parts = [self._sealed] if self._sealed else self._unsent[0].parts
            self._is_sending = True
            try:
                sent = self.socket.sendmsg(parts)
            except BlockingIOError:
                self._is_sending = False
                return
            if self._sealed:
                self._sealed = self._sealed[sent:]
            else:
                self._drop(sent)
            self._is_sending = False
            if self.is_open:
                self.sent_at = time.monotonic()

    def flush_all(self, patience_s: float) -> None:
        """Wait until all is sent; raise TimeoutError if the peer takes nothing for `patience_s`."""
        poll = select.poll()
        poll.register(self.socket, select.POLLOUT)
        while not self.is_flushed:
            if not poll.poll(max(1000 * patience_s, 0)):
                raise TimeoutError
            self.flush()

    def _seal(self, cipher: Cipher) -> None:
        """Encrypt the next unsent bytes as a record of limited size."""
        pieces: list[memoryview] = []
        nbytes = 0
        for part in self._unsent[0].parts:
            pieces.append(part[: _RECORD_BYTES - nbytes])
            nbytes += pieces[-1].nbytes
        record = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        room = _memory(_LENGTH.size + nbytes + TAG_BYTES)
        _LENGTH.pack_into(room, 0, nbytes)
        cipher.seal(record, room[_LENGTH.size :])
        self._drop(nbytes)
        self._sealed = room

    def _drop(self, nbytes: int) -> None:
        parts = self._unsent[0].parts
        while parts and nbytes >= parts[0].nbytes:
            nbytes -= parts.popleft().nbytes
        if nbytes:
            parts[0] = parts[0][nbytes:]
        if not parts:
            self._unsent.popleft()

    # --- receiving ------------------------------------------------------------------------------

    @property
    def has_ahead(self) -> bool:
        """True if bytes were received that `receive` has not returned yet."""
        return self._read < self._filled or bool(self._opened)

    def receive(self) -> list[memoryview] | None:
        """Return the next message, if it has arrived; raise OSError if the connection breaks."""
        try:
            next(self._reading)
        except StopIteration:
            raise ConnectionResetError from None
        message, self._message = self._message, None
        return message

    def _read_all(self, key: bytes | None, is_listener: bool) -> _Reading:
        yield from self._greet(key, is_listener)
        self.is_open = True
        prefix = memoryview(bytearray(_PREFIX.size))
        while True:
            yield from self._fill(prefix)
            count, *sizes = _PREFIX.unpack(prefix)
            if not 0 < count <= MAX_FRAMES or max(sizes) > self._max_frame_bytes:
                raise ConnectionAbortedError(f"{count} frames of {sizes} bytes")
            nbytes = sum(sizes[:count])
            room = self._shared_room if nbytes > _SMALL_BYTES else None
            if room is not None:
                self.received_at = time.monotonic()
                self.allowance = math.inf if room.enter(self, nbytes) else 0
            frames = [_memory(sizes[0])]
            yield from self._fill(frames[0])
            memory = self._place(frames[0], sizes[1]) if self._place and count == 2 else None
            if memory is None:
                memory = []
                for size in sizes[1:count]:
                    frames.append((yield from self._take(size)))
            for each in memory:
                yield from self._fill(each)
            if room is not None:
                room.leave(self)
                self.allowance = math.inf
            self._message = frames
            del frames, memory
            yield

    def _greet(self, key: bytes | None, is_listener: bool) -> _Reading:
        heard = memoryview(bytearray(_GREETING.size))
        if is_listener:
            yield from self._fill(heard)
            self.purpose = heard[-1]
        first, second = (_GREETING.pack(magic, key is not None, self.purpose) for magic in _MAGICS)
        if not is_listener:
            self._send([memoryview(first)])
            yield from self._fill(heard)
        if heard != (first if is_listener else second):
            raise ConnectionAbortedError("the peer is none of fastdist's, or only one has a key")
        if is_listener:
            self._send([memoryview(second)])
        if key is not None:
            yield from self._shake_hands(key, is_listener, first + second)

    def _shake_hands(self, key: bytes, is_listener: bool, prologue: bytes) -> _Reading:
        from fastdist.link.sealing import MESSAGE_BYTES, Handshake

        own = Handshake(key, is_initiator=not is_listener, prologue=prologue)
        message = bytearray(MESSAGE_BYTES)
        if not is_listener:
            self._send([memoryview(own.write())])
        yield from self._fill(memoryview(message))
        own.read(bytes(message))
        if is_listener:
            self._send([memoryview(own.write())])
        self._record = _memory(_RECORD_BYTES + TAG_BYTES)
        self._room = _memory(_RECORD_BYTES)
        self._way_out, self._way_in = own.split()
        # A recorded first message may be sent again, the first record cannot.
        if is_listener:
            yield from self._fill(memoryview(bytearray(1)))
        else:
            self._send([memoryview(b"\0")])

    def _take(self, nbytes: int) -> Generator[None, None, memoryview]:
        """Receive a frame; return NO_MEMORY in its place if there is none for it."""
        try:
            frame = _memory(nbytes)
        except ConnectionAbortedError:
            scratch = _memory(_RECORD_BYTES)
            while nbytes:
                part = scratch[:nbytes]
                yield from self._fill(part)
                nbytes -= part.nbytes
            return NO_MEMORY
        yield from self._fill(frame)
        return frame

    def _fill(self, out: memoryview) -> _Reading:
        """Receive until this memory is full."""
        if self._way_in is None:
            yield from self._fill_as_sent(out)
            return
        done = 0
        while done < out.nbytes:
            if not self._opened:
                length = memoryview(bytearray(_LENGTH.size))
                yield from self._fill_as_sent(length)
                (nbytes,) = _LENGTH.unpack(length)
                if not 0 < nbytes <= _RECORD_BYTES:
                    raise ConnectionAbortedError(f"a record of {nbytes} bytes")
                record = self._record[: nbytes + TAG_BYTES]
                yield from self._fill_as_sent(record)
                if nbytes <= out.nbytes - done:
                    self._way_in.open(record, out[done : done + nbytes])
                    done += nbytes
                    continue
                self._opened = self._room[:nbytes]
                self._way_in.open(record, self._opened)
            nbytes = min(self._opened.nbytes, out.nbytes - done)
            out[done : done + nbytes] = self._opened[:nbytes]
            self._opened = self._opened[nbytes:]
            done += nbytes

    def _fill_as_sent(self, out: memoryview) -> _Reading:
        done = 0
        while done < out.nbytes:
            if self._read < self._filled:
                nbytes = min(self._filled - self._read, out.nbytes - done)
                out[done : done + nbytes] = self._ahead[self._read : self._read + nbytes]
                self._read += nbytes
                done += nbytes
                continue
            is_large = out.nbytes - done >= _AHEAD_BYTES
            if is_large and self.allowance == 0:
                yield
                continue
            try:
                if is_large:
                    most = int(min(out.nbytes - done, self.allowance))
                    got = self.socket.recv_into(out[done:], most)
                else:
                    got = self.socket.recv_into(self._ahead)
            except BlockingIOError:
                yield
                continue
            if got == 0:
                raise ConnectionResetError
            if self.is_open:
                self.received_at = time.monotonic()
            if is_large:
                done += got
                self.allowance -= got
            else:
                self._read, self._filled = 0, got
