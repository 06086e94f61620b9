"""Files that this process had opened for writing before it started other replicas.

They run the program from its top too, and may delete or empty such a file, as `open(path, "w")` and
`shutil.rmtree` do. Its writer would go on without an error, in a file that nobody finds.
"""

from __future__ import annotations

import contextlib
import os
import stat
from dataclasses import dataclass

from fastdist.errors import FastdistError


@dataclass(frozen=True, slots=True)
class OpenedFile:
    """A regular file with a name, open for writing.

    Attributes:
        descriptor: this process's descriptor.
        device, inode: its identity, since descriptors are used again.
        size: its bytes when it was noted.
    """

    path: str
    descriptor: int
    device: int
    inode: int
    size: int

    def lost(self) -> str | None:
        """Return what has happened to the file; None if it is intact or closed."""
        with contextlib.suppress(OSError):
            now = os.fstat(self.descriptor)
            if (now.st_dev, now.st_ino) == (self.device, self.inode):
                if not now.st_nlink and os.path.exists(self.path):
                    return "deleted and made anew"
                if now.st_size < self.size:
                    return "emptied"
        return None


_noted: list[OpenedFile] = []


def note_opened_files() -> None:
    """Note the files that this process has open for writing; none without /proc."""
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError, ValueError):
                _noted.extend(_opened(int(name)))


def _opened(descriptor: int) -> list[OpenedFile]:
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or not status.st_nlink:
        return []
    with open(f"/proc/self/fdinfo/{descriptor}") as file:
        flags = next(int(line.split()[1], 8) for line in file if line.startswith("flags:"))
    if flags & os.O_ACCMODE == os.O_RDONLY:
        return []
    path = os.readlink(f"/proc/self/fd/{descriptor}")
    return [OpenedFile(path, descriptor, status.st_dev, status.st_ino, status.st_size)]


def require_intact_files() -> None:
    """Check that the other replicas, which have all come, have neither deleted nor emptied them."""
    files = _noted.copy()
    _noted.clear()
    for file in files:
        if (what := file.lost()) is not None:
            raise FastdistError(
                f"another replica has {what} {file.path}, which this program had opened before it "
                "made the strategy: the strategy starts the program once more for each other "
                "replica, from its top. Make the strategy the first statement, or write files "
                "only `if fastdist.is_chief():`"
            )
