"""What ended a process, as far as the process could write it: an exception that nobody caught."""

from __future__ import annotations

import contextlib
import json
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path

from fastdist.errors import FastdistError
from fastdist.recorder.frames import Frame, Stack


@dataclass(frozen=True, slots=True)
class Ending:
    """The exception that ended a process.

    Attributes:
        error: the name of its class.
        message: its first line, at most 300 characters.
        ranks: the ranks that caused it, as `FastdistError.ranks` names them.
        line: the innermost line of the user's code, "train.py:42 in step"; "" if none.
    """

    error: str
    message: str
    ranks: tuple[int, ...]
    line: str


def write_ending(path: Path, error: BaseException) -> None:
    """Write what ended this process."""
    frames = [
        Frame(each.filename, each.lineno or 0, each.name)
        for each in reversed(traceback.extract_tb(error.__traceback__))
    ]
    ending = Ending(
        type(error).__name__,
        next(iter(str(error).splitlines()), "")[:300],
        error.ranks if isinstance(error, FastdistError) else (),
        Stack(tuple(frames), is_main=True).user_line,
    )
    with contextlib.suppress(OSError):
        path.write_text(json.dumps(asdict(ending)), "utf-8")


def read_ending(path: Path) -> Ending | None:
    """Read what ended a process; None if the process could not write it."""
    try:
        fields = json.loads(path.read_text("utf-8"))
        return Ending(**fields | {"ranks": tuple(fields["ranks"])})
    except (OSError, ValueError, TypeError, KeyError):
        return None
