"""Processes that each lead a session, and everything that they have started."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from fastdist.processes import guardian
from fastdist.processes.output import Receiver
from fastdist.processes.proc import stat
from fastdist.processes.process import Process, start

_POLL_S = 0.02


class Sessions:
    """Starts processes as leaders of sessions, and ends them with all that they have started.

    A terminal's Ctrl-C therefore reaches this process alone, and a signal to a process group
    reaches all children of its leader. An ended process stays a zombie until it is released, so
    that no other process can get the number of the group. If this process is killed, the kernel
    kills the leaders, and a guardian process their children.
    """

    def __init__(self) -> None:
        self.processes: list[Process] = []
        self._guardian: subprocess.Popen[bytes] | None = None

    def start(
        self,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        receivers: Sequence[Receiver] = (),
        **options: Any,
    ) -> Process:
        """Start a process; takes the arguments of `fastdist.processes.process.start`."""
        if self._guardian is None:
            self._guardian = subprocess.Popen(
                [sys.executable, "-I", "-S", guardian.__file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                bufsize=0,
                start_new_session=True,
            )
        process = start(name, command, environment, receivers, start_new_session=True, **options)
        self._tell_guardian(process.popen.pid)
        self.processes.append(process)
        return process

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to all groups."""
        for process in self.processes:
            process.signal_group(number)

    def wait(self, timeout_s: float) -> None:
        """Wait until all leaders have ended, at most for `timeout_s`."""
        end_s = time.monotonic() + timeout_s
        while any(process.poll() is None for process in self.processes):
            if time.monotonic() > end_s:
                return
            time.sleep(_POLL_S)

    def has_strays(self) -> bool:
        """Return True if a process of a group still runs."""
        groups = _live_groups()
        return any(process.popen.pid in groups for process in self.processes)

    def release(self, process: Process) -> None:
        """Give up the group of a process that has been killed or has ended."""
        self._tell_guardian(-process.popen.pid)
        process.reap()
        self.processes.remove(process)

    def close(self) -> None:
        """Kill the remaining processes."""
        self.signal(signal.SIGKILL)
        while self.processes:
            self.release(self.processes[0])
        if self._guardian is not None:
            with self._guardian:  # its stdin ends
                pass

    def _tell_guardian(self, group: int) -> None:
        assert self._guardian is not None
        assert self._guardian.stdin is not None
        with suppress(OSError):  # somebody has killed the guardian; the job continues without it
            self._guardian.stdin.write(guardian.GROUP.pack(group))


def _live_groups() -> set[int]:
    """Return the process groups with a running process."""
    groups = set()
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        with suppress(OSError):
            state, _, group = stat(name)[:3]
            if state not in "ZX":
                groups.add(int(group))
    return groups
