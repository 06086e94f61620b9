"""Signals and process groups for a launcher."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_PR_SET_PDEATHSIG = 1


@contextmanager
def signal_pipe() -> Iterator[int]:
    """Yields a pipe that receives a byte for each SIGCHLD, SIGINT, SIGTERM and SIGHUP."""
    numbers = [signal.SIGCHLD, signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # set by nohup
        numbers.append(signal.SIGHUP)
    read, write = os.pipe()
    os.set_blocking(read, False)
    os.set_blocking(write, False)
    old_fd = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    old = {number: signal.signal(number, lambda *_: None) for number in numbers}
    try:
        yield read
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(old_fd)
        os.close(read)
        os.close(write)


def live_groups() -> set[int]:
    """Returns the process groups with a running process."""
    groups = set()
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        with suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
            state, _, group = file.read().rpartition(b")")[2].split()[:3]
            if state not in b"ZX":
                groups.add(int(group))
    return groups
