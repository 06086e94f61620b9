"""The folder in memory where this user's processes record what they do."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

_SUFFIX = ".calls"
Kind = Literal["stacks", "asks", "answer", "ending", "machines", "ended"]


@dataclass(frozen=True, slots=True)
class RecordPath:
    """The file of a process's records; `namespace` is the Linux namespace of its process id."""

    path: Path
    namespace: int
    pid: int

    def beside(self, kind: Kind) -> Path:
        """Return another file of the process.

        Args:
            kind: "stacks": the main thread's stack, which is written on a signal; "asks": the pipe
                through which other processes ask for the stacks of all threads; "answer": the last
                answer, an `AnsweredStacks`; "ending": the exception that ended the process;
                "machines": those of its job, if there are several; "ended": made at its first
                `seconds_ended`.
        """
        return self.path.with_suffix(f".{kind}")

    def remove(self) -> None:
        """Remove all files of the process."""
        for path in (*map(self.beside, get_args(Kind)), self.path):
            path.unlink(missing_ok=True)

    def seconds_ended(self) -> float:
        """Return the seconds since the first call, which notes that the process is dead."""
        ended = self.beside("ended")
        with contextlib.suppress(FileExistsError):
            ended.touch(exist_ok=False)
        known_s = time.time() - ended.stat().st_mtime
        if not self.path.exists():  # another process has removed the records meanwhile
            ended.unlink(missing_ok=True)
        return known_s

    @property
    def is_locked(self) -> bool:
        """True while the process lives, even in another container: it has locked its records."""
        try:
            with self.path.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            pass
        return False

    @property
    def is_here(self) -> bool:
        """True if `pid` is valid in this process's namespace."""
        return self.namespace == own_namespace()


def own_namespace() -> int:
    """Return the number of this process's namespace of process ids."""
    return os.stat("/proc/self/ns/pid").st_ino


def new_path() -> RecordPath:
    """Name a file for this process's records, in a folder that exists."""
    error: OSError = FileNotFoundError("no folder for records")
    for folder in _folders():
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
            check_private(folder)
        except OSError as failed:
            error = failed
            continue
        namespace, pid = own_namespace(), os.getpid()
        name = f"{namespace}-{pid}-{secrets.token_hex(4)}{_SUFFIX}"
        return RecordPath(folder / name, namespace, pid)
    raise error


def record_paths() -> Iterator[RecordPath]:
    """Find the records of this user's processes on this machine, of dead ones too."""
    for folder in _folders():
        try:
            check_private(folder)
            paths = list(folder.glob(f"*{_SUFFIX}"))
        except OSError:
            continue
        for path in paths:
            namespace, _, rest = path.name.partition("-")
            pid = rest.partition("-")[0]
            if namespace.isdecimal() and pid.isdecimal():
                yield RecordPath(path, int(namespace), int(pid))


def unusable_folders() -> list[str]:
    """Return why folders that exist hold no records: another user may open or has made them."""
    found = []
    for folder in _folders():
        try:
            check_private(folder)
        except PermissionError as error:
            found.append(str(error))
        except OSError:
            pass
    return found


def changes_s() -> list[float]:
    """Return when records were last made or removed, by folder, in seconds since 1970."""
    times = []
    for folder in _folders():
        with contextlib.suppress(OSError):
            times.append(os.stat(folder).st_mtime)
    return times


def _folders() -> list[Path]:
    name = f"fastdist-{os.getuid()}"
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    parents = ["/dev/shm", *([runtime] if runtime else []), os.environ.get("TMPDIR") or "/tmp"]
    return [Path(parent, name) for parent in parents]


def check_private(folder: Path) -> None:
    """Raise PermissionError if other users may open files in a folder."""
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(f"{folder} must be a folder of this user's alone, of mode 700")
