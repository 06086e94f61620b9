"""Signals and process groups for a launcher."""

import ctypes
import os
import signal
from collections.abc import Callable, Iterator
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


def death_signal_setter() -> Callable[[], None]:
    """Returns a function for `preexec_fn` that makes the child die with this process."""
    prctl = ctypes.CDLL(None).prctl
    arguments = [ctypes.c_ulong(value) for value in (signal.SIGKILL, 0, 0, 0)]
    parent = os.getpid()

    def die_with_parent() -> None:
        prctl(_PR_SET_PDEATHSIG, *arguments)
        if os.getppid() != parent:  # the parent died before the call
            os._exit(1)

    return die_with_parent


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


def signal_name(number: int) -> str:
    """Returns a signal's number and, if it has one, its name: "9 (SIGKILL)"."""
    try:
        return f"{number} ({signal.Signals(number).name})"
    except ValueError:  # a real-time signal
        return str(number)
