"""Forwards the output of several processes to one terminal or file, line by line.

A `Stream` reads the stdout or stderr of one process and writes whole lines, each after the
process's prefix, to a `Sink`: the launcher's own stdout or stderr. Streams and sinks never block,
keep a bounded number of bytes, and handle bytes of any encoding.
"""

import os
import re
import select
import time

from fastdist.replicas.processes import last_words

_READ_BYTES = 1 << 16
_INNER_RETURN = re.compile(rb"\r(?!\n|\Z)")
_LONGEST_LINE_BYTES = 1 << 20
_TAIL_BYTES = 1 << 16


class Sink:
    """The launcher's stdout or stderr, which the streams share.

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
        """Writes data of a source; the last line may be unfinished.

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
        """Ends the unfinished line of the source, if there is one."""
        if self._unfinished is source:
            self.put(source, b"", b"\n")

    def flush(self) -> None:
        """Writes as many bytes as the file takes without blocking."""
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


class Stream:
    """The stdout or stderr of one process.

    Lines up to 1 MiB reach the sink whole; output of another stream may split a longer line.
    """

    def __init__(self, fd: int, sink: Sink, prefix: bytes, *, adds_last_newline: bool) -> None:
        self.fd = fd
        self.sink = sink
        self.is_open = True
        self._prefix = prefix
        self._adds_last_newline = adds_last_newline
        self._line = bytearray()
        self._read_at_s = 0.0
        self._tail = bytearray()
        os.set_blocking(fd, False)

    def read(self) -> bool:
        """Forwards up to 64 KiB of the output so far; returns False if there was none."""
        try:
            data = os.read(self.fd, _READ_BYTES)
        except BlockingIOError:
            return False
        if not data:
            self.end()
            return False
        self._read_at_s = time.monotonic()
        self._tail += data
        del self._tail[:-_TAIL_BYTES]
        whole = len(self._line) + data.rfind(b"\n") + 1 if b"\n" in data else 0
        self._line += data
        if len(self._line) - whole > _LONGEST_LINE_BYTES:
            whole = len(self._line)
        self._forward(whole)
        return True

    def forward_prompt(self, idle_s: float) -> bool:
        """On a terminal, forwards an unfinished line that is at least `idle_s` seconds old.

        The line may be a prompt or a progress bar. Returns True if a younger line is unfinished.
        """
        if not self._line or not self.sink.is_terminal:
            return False
        if time.monotonic() - self._read_at_s < idle_s:
            return True
        self._forward(len(self._line))
        return False

    def last_words(self) -> tuple[str, bytes]:
        """The end of the stream, after its name: the last traceback, else the last few lines."""
        return last_words(bytes(self._tail))

    def _forward(self, size: int) -> None:
        data = bytes(self._line[:size])
        del self._line[:size]
        self.sink.put(self, self._prefix, data)

    def end(self) -> None:
        """Closes the stream; forwards an unfinished last line."""
        self.is_open = False
        self._forward(len(self._line))
        if self._adds_last_newline:
            self.sink.finish_line(self)
