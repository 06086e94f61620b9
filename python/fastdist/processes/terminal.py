"""Writes lines that fit the terminal, and says so in a sentence if they cannot be written."""

from __future__ import annotations

import os
import re
import shutil
import sys
import textwrap
from typing import IO


class OutputError(Exception):
    """Output cannot be written, as on a full disk; the message says why."""


def width_of(file: IO[str]) -> int | None:
    """Return the columns of the terminal that a file is; None for other files."""
    return shutil.get_terminal_size().columns if file.isatty() else None


def broken(line: str, width: int | None, indent: str | None = None) -> list[str]:
    """Break a line that is wider than `width` between words; words stay whole, to be copied.

    Further lines begin with `indent`; None: with that of the line, and two spaces.
    """
    if width is None or len(line) <= width:
        return [line]
    if indent is None:
        indent = re.sub(r"^(#?\s*).*", r"\1  ", line)
    return textwrap.wrap(
        line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def fitted(text: str, file: IO[str]) -> str:
    """Break the lines of a text that do not fit the terminal that `file` is."""
    width = width_of(file)
    return "\n".join(part for line in text.split("\n") for part in broken(line, width))


def show(text: str, file: IO[str] | None = None) -> None:
    """Write to a file at once, stdout if None."""
    file = file or sys.stdout
    try:
        file.write(text)
        file.flush()
    except OSError as error:
        # Python would try once more, when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), file.fileno())
        if isinstance(error, BrokenPipeError):
            return  # the reader has seen enough: `fastdist ps | head -1`
        raise OutputError(f"cannot write to {file.name.strip('<>')}: {error.strerror}") from None


def note(text: str) -> None:
    """Write a line to stderr."""
    sys.stderr.write(fitted(f"{text}\n", sys.stderr))
    sys.stderr.flush()
