"""Notes of the end of a process, by an uncaught exception or a signal."""

from __future__ import annotations

import signal
import traceback
from dataclasses import dataclass
from pathlib import Path

from fastdist.errors import CollectiveMismatchError, FastdistError
from fastdist.recorder.encoding import write
from fastdist.recorder.frames import Frame, Stack
from fastdist.recorder.place import record_paths
from fastdist.recorder.system import out_of_memory_kills

_LONGEST = 300  # characters


@dataclass(frozen=True, slots=True)
class Ending:
    """The exception or the signal that ended a process.

    Attributes:
        error: the name of the exception's class; "" without an exception.
        message: the exception's first line, and the calls of a mismatch; or "killed by SIGKILL".
        ranks: the ranks that caused it, as `FastdistError.ranks` names them.
        line: the innermost line of the user's code, "train.py:42 in step"; "" if none.
        was_first: True if the launcher saw it end before the others.
    """

    error: str
    message: str
    ranks: tuple[int, ...]
    line: str
    was_first: bool = False


def write_ending(path: Path, error: BaseException) -> None:
    """Write the exception that ended this process."""
    frames = [
        Frame(each.filename, each.lineno or 0, each.name)
        for each in reversed(traceback.extract_tb(error.__traceback__))
    ]
    ending = Ending(
        type(error).__name__,
        _valid(_message(error)),
        error.ranks if isinstance(error, FastdistError) else (),
        _valid(Stack(tuple(frames), is_main=True).user_line),
    )
    write(path, ending)


def _message(error: BaseException) -> str:
    first, *rest = str(error).splitlines() or [""]
    if not isinstance(error, CollectiveMismatchError):
        return first[:_LONGEST]
    by_call = {line.partition(": ")[2]: line.strip() for line in reversed(rest)}
    return f"{first} {'; '.join(reversed(by_call.values()))}"[: 4 * _LONGEST]


def note_end(pid: int, status: int) -> None:
    """Note how a process ended, before the other ranks of its job did, unless it has said so.

    Records alone do not tell which rank ended first, among ranks that waited for nobody. `status`
    is the exit code, or minus the number of the signal that killed it.
    """
    how = f"killed by {_name(-status)}" if status < 0 else f"ended with exit code {status}"
    for found in record_paths():
        if found.is_here and found.pid == pid and not found.beside("ending").exists():
            write(found.beside("ending"), Ending("", how, (), "", was_first=True))


def _name(number: int) -> str:
    try:
        name = signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
    if number == signal.SIGKILL and out_of_memory_kills():
        name += ", perhaps by the kernel: memory has run out here before"
    return name


def _valid(text: str) -> str:
    """Replace bytes that are not Unicode: names of files may hold any bytes."""
    return text.encode("utf-8", "backslashreplace").decode()
