"""The lock of a directory of checkpoints: only one job writes to it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
import time
from pathlib import Path

PATIENCE_S = 10.0  # for a holder that is being killed
_NAME = ".lock"
_WHOLE_FILE = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)  # a struct flock
_held: dict[Path, DirectoryLock] = {}


class DirectoryLock:
    """A lock that this process holds until it ends or calls `release`.

    The kernel ties the lock to this object's open file description (fcntl_locking(2)): it is kept
    when the process closes the file elsewhere. Over NFS it holds between machines.
    """

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        if directory in _held:
            raise BlockingIOError(f"{directory} is in use by another manager of this process")
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        # For its owner alone: others, who could read it, could lock it too.
        self._file = os.fdopen(os.open(directory / _NAME, flags, 0o600), "a+")
        with contextlib.suppress(OSError):  # of another user
            os.fchmod(self._file.fileno(), 0o600)
        deadline = time.monotonic() + PATIENCE_S
        while not self._try():
            if time.monotonic() > deadline:
                self._file.seek(0)
                holder = _living(self._file.read().strip())
                self._file.close()
                raise BlockingIOError(
                    f"{directory} is in use by another job{holder}: give each job a directory "
                    "of its own"
                )
            time.sleep(0.1)
        self._file.truncate(0)
        self._file.write(f"{_description(os.getpid())}\n")
        self._file.flush()
        _held[directory] = self

    def release(self) -> None:
        """Release the lock."""
        if _held.pop(self._directory, None) is self:
            self._file.close()

    def _try(self) -> bool:
        try:
            fcntl.fcntl(self._file, fcntl.F_OFD_SETLK, _WHOLE_FILE)
        except (BlockingIOError, PermissionError):
            return False
        return True


def _description(pid: int) -> str:
    return f"process {pid} on {socket.gethostname()}"


def _living(holder: str) -> str:
    """Return the holder's note in brackets; nothing if it is of a process that has ended here."""
    pid = holder.removeprefix("process ").partition(" ")[0]
    ended = pid.isdecimal() and holder == _description(int(pid)) and not Path("/proc", pid).exists()
    return "" if ended or not holder else f" ({holder})"


def _let_go() -> None:
    """Close the files in a forked child, which would otherwise keep the locks after the parent."""
    while _held:
        _held.popitem()[1]._file.close()


os.register_at_fork(after_in_child=_let_go)
