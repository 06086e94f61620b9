"""Forwards the output of several processes to one terminal or file, line by line.

A `Stream` reads what one process writes to its stdout or stderr and hands whole lines, each behind
the process's prefix, to a `Sink`: the launcher's own stdout or stderr. Neither ever blocks or keeps
more than a bounded number of bytes, and all of it is bytes: what is written needs no encoding.
"""

import os
import re
import select
import time

_READ_BYTES = 1 << 16
_LONGEST_LINE_BYTES = 1 << 20
_TAIL_BYTES = 1 << 16
_LAST_LINES = 10

_TRACEBACK = re.compile(rb"^(?:  \+ Exception Group )?Traceback \(most recent call last\):", re.M)
_CHAINED = (
    b"\n\nDuring handling of the above exception, another exception occurred:\n\n",
    b"\n\nThe above exception was the direct cause of the following exception:\n\n",
)


class Sink:
    """One of the launcher's own output files, which the streams share.

    What the file does not take at once stays in `pending`; whoever feeds the sink is to stop until
    it is empty again. An error, such as a closed pipe, is kept in `error`, and output from then on
    is thrown away.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.is_terminal = os.isatty(fd)
        self.pending = bytearray()
        self.error: OSError | None = None
        self._unfinished: object | None = None
        self._poll = select.poll()
        self._poll.register(fd, select.POLLOUT)

    def put(self, source: object, prefix: bytes, data: bytes) -> None:
        """Writes a source's data, which may leave its last line unfinished.

        The source goes on with its own unfinished line; any other source begins a new one.
        """
        if not data or self.error is not None:
            return
        if self._unfinished is not source:
            self.pending += b"\n" + prefix if self._unfinished is not None else prefix
        self.pending += data[:-1].replace(b"\n", b"\n" + prefix) + data[-1:]
        self._unfinished = None if data.endswith(b"\n") else source
        self.flush()

    def finish_line(self, source: object) -> None:
        """Ends the line that the source has left unfinished, if it has."""
        if self._unfinished is source:
            self.put(source, b"", b"\n")

    def flush(self) -> None:
        """Writes as much as the file takes without blocking."""
        # A pipe that polls as writable takes PIPE_BUF bytes for certain. Setting O_NONBLOCK instead
        # would set it for every process that shares the file.
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
    """What one process writes to its stdout or stderr.

    Lines up to 1 MiB reach the sink whole; a longer one may be cut in two by another's.
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
        """Forwards what was written by now, at most 64 KiB; false when that is nothing."""
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
        """On a terminal, shows a line that has stayed unfinished for that long.

        It may be a prompt or a progress bar. Returns whether there is one to show later.
        """
        if not self._line or not self.sink.is_terminal:
            return False
        if time.monotonic() - self._read_at_s < idle_s:
            return True
        self._forward(len(self._line))
        return False

    def last_words(self) -> tuple[str, bytes]:
        """What the stream ended with, and a name for it: a traceback, or else a few lines."""
        tail = bytes(self._tail)
        starts = [match.start() for match in _TRACEBACK.finditer(tail)]
        if not starts:
            lines = tail.splitlines(keepends=True)[-_LAST_LINES:]
            return "last lines on stderr", b"".join(lines)
        first = len(starts) - 1
        while first > 0 and tail[: starts[first]].endswith(_CHAINED):
            first -= 1
        return "traceback", tail[starts[first] :]

    def _forward(self, size: int) -> None:
        data = bytes(self._line[:size])
        del self._line[:size]
        self.sink.put(self, self._prefix, data)

    def end(self) -> None:
        """Forwards an unfinished last line; there will be nothing more."""
        self.is_open = False
        self._forward(len(self._line))
        if self._adds_last_newline:
            self.sink.finish_line(self)
