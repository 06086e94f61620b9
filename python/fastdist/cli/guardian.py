"""Ends the processes of a job if the launcher is killed before it can do so."""

import os
import signal
import struct
from contextlib import suppress
from typing import NoReturn

_GROUP = struct.Struct("i")
_MOST_FILES = 1 << 16


class Guardian:
    """A process that kills process groups when this process ends without calling `close`.

    The kernel kills the ranks of a killed launcher by itself, but not their children, and no rank
    that has changed its user. Must be made while this process has one thread.
    """

    def __init__(self) -> None:
        read, self._write = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            _watch(read)
        os.close(read)

    def add(self, group: int) -> None:
        """Kill this group too."""
        os.write(self._write, _GROUP.pack(group))

    def close(self) -> None:
        """End the process; it kills nothing."""
        os.write(self._write, _GROUP.pack(0))
        os.close(self._write)
        os.waitpid(self._pid, 0)


def _watch(read: int) -> NoReturn:
    try:
        os.setsid()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
            signal.signal(number, signal.SIG_IGN)
        os.closerange(0, read)
        os.closerange(read + 1, _MOST_FILES)
        groups: set[int] = set()
        while word := os.read(read, _GROUP.size):
            (group,) = _GROUP.unpack(word)
            if group == 0:
                groups.clear()
                break
            groups.add(group)
        for group in groups:
            with suppress(OSError):
                os.killpg(group, signal.SIGKILL)
    finally:
        os._exit(0)
