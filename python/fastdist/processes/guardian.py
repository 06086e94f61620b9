"""A program that kills process groups when its stdin ends.

It reads the groups from stdin: a positive number adds a group, a negative number removes it.
`Sessions` runs it, for jobs whose launcher is killed: the kernel kills the launcher's processes,
but not their children, and no process that has changed its user.
"""

import os
import signal
import struct
from contextlib import suppress

GROUP = struct.Struct("i")


def _watch() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    groups: set[int] = set()
    while word := os.read(0, GROUP.size):
        (group,) = GROUP.unpack(word)
        (groups.add if group > 0 else groups.discard)(abs(group))
    for group in groups:
        with suppress(OSError):
            os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    _watch()
