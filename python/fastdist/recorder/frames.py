"""Frames of Python's stacks; tells the user's from others."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

_INSTALLED = re.compile(r"/(site|dist)-packages/")
_NOT_USERS = re.compile(
    r"/(site|dist)-packages/(torch|fastdist)/"
    r"|/python3(\.\d+)?t?/(?!(site|dist)-packages/)"
    r"|^<"
    f"|^{re.escape(str(Path(__file__).parents[1]))}/"
)


@dataclass(frozen=True, slots=True)
class Frame:
    """A frame of a stack."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}"


@dataclass(frozen=True, slots=True)
class Stack:
    """The stack of a thread, the innermost frame first."""

    frames: tuple[Frame, ...]
    is_main: bool

    @property
    def user_line(self) -> str:
        """The innermost frame of the user's own code, "train.py:42 in step"; "" if none."""
        users = [frame for frame in self.frames if not _NOT_USERS.search(frame.file)]
        own = (frame for frame in users if not _INSTALLED.search(frame.file))
        return str(next(own, users[0] if users else ""))

    def is_in(self, site: str) -> bool:
        """Return True inside the function of a call's site, "train.py:42 in step"."""
        place, _, function = site.partition(" in ")
        file = Path(place.rpartition(":")[0]).name
        return any(f.function == function and Path(f.file).name == file for f in self.frames)

    def passes(self, pattern: re.Pattern[str]) -> bool:
        """Return True inside a file whose path has this pattern."""
        return any(pattern.search(frame.file) for frame in self.frames)
