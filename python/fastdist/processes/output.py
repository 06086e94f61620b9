"""Reads the output of processes, and forwards it to one terminal or file, line by line.

A `Stream` reads the stdout or stderr of one process. `Lines` passes it on in whole lines, each
after the process's prefix, to a `Sink`: the launcher's own stdout or stderr. All of them never
block, keep a bounded number of bytes, and handle bytes of any encoding.
"""

import os
import re
import select
import selectors
import time
from collections.abc import Callable

Receiver = Callable[[bytes], None]
"""Is called with the output of a process as it arrives, and with no bytes at its end."""

_READ_BYTES = 1 << 16
_MOST_READS_AT_END = 32
_INNER_RETURN = re.compile(rb"\r(?!\n|\Z)")
_LONGEST_LINE_BYTES = 1 << 20
_TAIL_BYTES = 1 << 16
_LAST_LINES = 10
_TRACEBACK = re.compile(rb"^(?:  \+ Exception Group )?Traceback \(most recent call last\):", re.M)
_CHAINED = (
    b"\n\nDuring handling of the above exception, another exception occurred:\n\n",
    b"\n\nThe above exception was the direct cause of the following exception:\n\n",
)


class Sink:
    """The launcher's stdout or stderr, which all processes share.

    Bytes that the file does not take at once stay in `pending`; callers must not call `put` again
    until it is empty. An error, such as a closed pipe, is stored in `error`, and all later output
    is discarded.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.is_terminal = os.isatty(fd)
        self.pending = bytearray()
        self.error: OSError | None = None
        self._unfinished: object | None = None
        self._has_returned = False  # to the beginning of the unfinished line
        self._poll = select.poll()
        self._poll.register(fd, select.POLLOUT)

    def put(self, source: object, prefix: bytes, data: bytes) -> None:
        """Write data of a source; the last line may be unfinished.

        The same source continues its unfinished line; another source begins a new line. On a
        terminal, what is written over a line (a progress bar) gets the prefix, too.
        """
        if not data or self.error is not None:
            return
        if self._unfinished is not source:
            self.pending += b"\n" + prefix if self._unfinished is not None else prefix
        elif self._has_returned and data[:1] != b"\n":
            self.pending += prefix
        if self.is_terminal:
            self._has_returned = data.endswith(b"\r")
            data = _INNER_RETURN.sub(lambda _: b"\r" + prefix, data)
        self.pending += data[:-1].replace(b"\n", b"\n" + prefix) + data[-1:]
        self._unfinished = None if data.endswith(b"\n") else source
        self.flush()

    def finish_line(self, source: object) -> None:
        """End the unfinished line of the source, if there is one."""
        if self._unfinished is source:
            self.put(source, b"", b"\n")

    def flush(self) -> None:
        """Write as many bytes as the file takes without blocking."""
        # A pipe that polls as writable takes at least PIPE_BUF bytes. O_NONBLOCK would apply to
        # every process that shares the file.
        written = 0
        try:
            while written < len(self.pending) and self._poll.poll(0):
                written += os.write(self.fd, self.pending[written : written + select.PIPE_BUF])
        except BlockingIOError:
            pass
        except OSError as error:
            self.error, written = error, len(self.pending)
        del self.pending[:written]


class Lines:
    """Passes the output of a process on to a sink.

    Lines up to 1 MiB reach the sink whole; output of another process may split a longer line.
    """

    def __init__(self, sink: Sink, prefix: bytes, *, adds_last_newline: bool) -> None:
        self.sink = sink
        self._prefix = prefix
        self._adds_last_newline = adds_last_newline
        self._line = bytearray()
        self._put_at_s = 0.0

    def put(self, data: bytes) -> None:
        """Forward the lines that data ends; without data, which is the end, the last line."""
        self._put_at_s = time.monotonic()
        whole = len(self._line) + data.rfind(b"\n") + 1 if b"\n" in data else 0
        self._line += data
        if not data or len(self._line) - whole > _LONGEST_LINE_BYTES:
            whole = len(self._line)
        self._forward(whole)
        if not data and self._adds_last_newline:
            self.sink.finish_line(self)

    def forward_prompt(self, idle_s: float) -> bool:
        """On a terminal, forward an unfinished line that is at least `idle_s` seconds old.

        The line may be a prompt or a progress bar. Return True if a younger line is unfinished.
        """
        if not self._line or not self.sink.is_terminal:
            return False
        if time.monotonic() - self._put_at_s < idle_s:
            return True
        self._forward(len(self._line))
        return False

    def _forward(self, size: int) -> None:
        data = bytes(self._line[:size])
        del self._line[:size]
        self.sink.put(self, self._prefix, data)


class Stream:
    """Reads what a process writes to a pipe, without blocking, and keeps the last 64 KiB."""

    def __init__(self, fd: int, receive: Receiver) -> None:
        self.fd = fd
        self.tail = bytearray()
        self.is_open = True
        self._receive = receive
        self._selector: selectors.BaseSelector | None = None
        os.set_blocking(fd, False)

    def watch(self, selector: selectors.BaseSelector) -> None:
        """Register `read` with a selector, as the data of its key, until `pause` or the end."""
        if self.is_open and self._selector is None:
            selector.register(self.fd, selectors.EVENT_READ, self.read)
            self._selector = selector

    def pause(self) -> None:
        """Undo `watch`."""
        if self._selector is not None:
            self._selector.unregister(self.fd)
            self._selector = None

    def read(self) -> bool:
        """Pass on up to 64 KiB of the output so far; return False if there was none."""
        try:
            data = os.read(self.fd, _READ_BYTES) if self.is_open else b""
        except BlockingIOError:
            return False
        if not data:
            self._end()
            return False
        self.tail += data
        del self.tail[:-_TAIL_BYTES]
        self._receive(data)
        return True

    def read_rest(self) -> None:
        """Read what a process has written that has ended; its children may write more."""
        for _ in range(_MOST_READS_AT_END):
            if not self.read():
                return

    def finish(self) -> None:
        """Read the rest, which is then the end, although children may hold the pipe open."""
        self.read_rest()
        self._end()

    def _end(self) -> None:
        self.pause()
        if self.is_open:
            self.is_open = False
            self._receive(b"")


def last_words(tail: bytes | bytearray) -> tuple[str, bytes]:
    """Return ("traceback", the last traceback in an output), or ("last lines", these lines)."""
    starts = [match.start() for match in _TRACEBACK.finditer(tail)]
    if not starts:
        return "last lines", b"".join(tail.splitlines(keepends=True)[-_LAST_LINES:])
    first = len(starts) - 1
    while first > 0 and tail[: starts[first]].endswith(_CHAINED):
        first -= 1
    return "traceback", bytes(tail[starts[first] :])
