"""Ends the processes of a job if the launcher is killed before it can do so.

Run as a program, it reads process groups from stdin: a positive number adds a group, a negative
number removes it. When stdin ends, it kills the groups that are left.
"""

import os
import signal
import struct
import subprocess
import sys
from contextlib import suppress

_GROUP = struct.Struct("i")


class Guardian:
    """A process that kills process groups when this process ends without removing them.

    The kernel kills the ranks of a killed launcher by itself, but not their children, and no rank
    that has changed its user.
    """

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            start_new_session=True,
        )

    def add(self, group: int) -> None:
        """Kill this group too."""
        self._send(group)

    def remove(self, group: int) -> None:
        """Do not kill this group: another job may get its number."""
        self._send(-group)

    def _send(self, group: int) -> None:
        assert self._process.stdin is not None
        with suppress(OSError):  # somebody has killed the guardian; the job goes on without it
            self._process.stdin.write(_GROUP.pack(group))

    def close(self) -> None:
        """End the process, after all groups have been removed."""
        with self._process:
            pass


def _watch() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    groups: set[int] = set()
    while word := os.read(0, _GROUP.size):
        (group,) = _GROUP.unpack(word)
        (groups.add if group > 0 else groups.discard)(abs(group))
    for group in groups:
        with suppress(OSError):
            os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    _watch()
