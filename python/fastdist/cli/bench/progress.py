"""Shows the progress of the bench: a bar on a terminal if rich is installed.

The bar is drawn between measurements only, never by a thread that takes a core from them.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol, TextIO

from fastdist.processes.terminal import fitted, show


class Progress(Protocol):
    """Output of the table's lines and of the progress between them."""

    def line(self, text: str) -> None:
        """Print a line."""

    def begin(self, label: str) -> None:
        """Start the measurement with this label."""

    def step(self) -> None:
        """Count a finished step."""


class _PlainProgress:
    def __init__(self, file: TextIO) -> None:
        self._file = file

    def line(self, text: str) -> None:
        show(fitted(f"{text}\n", self._file), self._file)

    def begin(self, label: str) -> None:
        if self._file.isatty():
            print(f"measuring {label} ...", file=sys.stderr, flush=True)

    def step(self) -> None:
        pass


class _BarProgress:
    def __init__(self, file: TextIO, steps: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as RichProgress

        self.bar = RichProgress(
            TextColumn("{task.description}"),
            BarColumn(),
            TimeRemainingColumn(),
            console=Console(file=file),
            auto_refresh=False,
            transient=True,
        )
        self._task = self.bar.add_task("starting", total=steps)

    def line(self, text: str) -> None:
        text = fitted(text, self.bar.console.file)
        self.bar.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def begin(self, label: str) -> None:
        self.bar.update(self._task, description=label, refresh=True)

    def step(self) -> None:
        self.bar.update(self._task, advance=1, refresh=True)


@contextmanager
def shown_progress(file: TextIO, steps: int) -> Iterator[Progress]:
    """Show a bar of `steps` steps below the lines, if `file` is a terminal.

    Without rich, a terminal gets a line per size on stderr instead.
    """
    if not file.isatty() or importlib.util.find_spec("rich") is None:
        yield _PlainProgress(file)
    else:
        progress = _BarProgress(file, steps)
        with progress.bar:
            yield progress
