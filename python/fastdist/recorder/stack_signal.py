"""Lets this process write its main thread's stack when another process asks by a signal.

The handler is Python's faulthandler: C that takes no lock, so that it works while the GIL is held
and inside of C. It could write the stacks of all threads, but the frames of a thread that runs
meanwhile go away under it, which has ended a healthy process by a segmentation fault.
"""

from __future__ import annotations

import faulthandler
import signal
from pathlib import Path
from typing import Any

SIGNAL = signal.SIGRTMAX - 7
"""The signal that asks for the stack."""

_files: list[Any] = []  # that faulthandler writes to


def write_on_signal(path: Path) -> None:
    """Let this process write its stack to a file when `SIGNAL` comes.

    Does nothing if the program handles the signal itself.
    """
    if signal.getsignal(SIGNAL) != signal.SIG_DFL:
        return
    file = path.open("ab", buffering=0)
    _files.append(file)
    faulthandler.register(SIGNAL, file=file, all_threads=False, chain=False)
