"""The lock of a directory of checkpoints: only one job writes to it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from pathlib import Path

PATIENCE_S = 10.0  # for a holder that is being killed
_NAME = ".lock"
_held: dict[Path, DirectoryLock] = {}


class DirectoryLock:
    """A lock that this process holds until it ends or calls `release`.

    The kernel ties the lock to this object's open file description (flock(2)): it is kept when the
    process closes the file elsewhere. Over NFS it holds between machines.
    """

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        if directory in _held:
            raise BlockingIOError(f"{directory} is in use by another manager of this process")
        # For its owner alone: others, who could read it, could lock it too.
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        self._file = os.fdopen(os.open(directory / _NAME, flags, 0o600))
        with contextlib.suppress(OSError):  # of another user
            os.fchmod(self._file.fileno(), 0o600)
        deadline = time.monotonic() + PATIENCE_S
        while True:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            if time.monotonic() > deadline:
                self._file.close()
                raise BlockingIOError(
                    f"{directory} is in use by another job: give each job a directory of its own"
                )
            time.sleep(0.1)
        _held[directory] = self

    def release(self) -> None:
        """Release the lock."""
        if _held.pop(self._directory, None) is self:
            self._file.close()


def _let_go() -> None:
    """Close the files in a forked child, which would otherwise keep the locks after the parent."""
    while _held:
        _held.popitem()[1]._file.close()


os.register_at_fork(after_in_child=_let_go)
