"""Frames of Python's stacks; tells the user's from others."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

_NOT_USERS = re.compile(
    r"/(site|dist)-packages/(torch|fastdist)/"
    r"|/python3(\.\d+)?t?/(?!(site|dist)-packages/)"
    r"|^<"
    f"|^{re.escape(str(Path(__file__).parents[1]))}/"
)
_DATA = re.compile(r"/torch/utils/data/|/fastdist/data/|/(datasets|webdataset|torchdata)/")
_GPU = re.compile(r"/torch/cuda/")


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
        users = (frame for frame in self.frames if not _NOT_USERS.search(frame.file))
        return str(next(users, ""))

    @property
    def is_loading(self) -> bool:
        """True inside a data loader."""
        return self._has(_DATA)

    @property
    def is_in_torch_cuda(self) -> bool:
        """True inside torch.cuda, whose calls wait for GPUs."""
        return self._has(_GPU)

    def _has(self, pattern: re.Pattern[str]) -> bool:
        return any(pattern.search(frame.file) for frame in self.frames)
