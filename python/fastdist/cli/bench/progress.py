"""Shows the progress of the bench: a bar on a terminal if rich is installed.

The bar is drawn between measurements only, never by a thread that takes a core from them.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from fastdist.processes.terminal import fitted, show


class Progress:
    """Prints the table's lines, and the progress between them, with or without a bar of rich."""

    def __init__(self, file: TextIO, bar: Any = None) -> None:
        self._file = file
        self._bar = bar

    def line(self, text: str) -> None:
        """Print a line."""
        text = fitted(text, self._file)
        if self._bar is None:
            show(f"{text}\n", self._file)
        else:
            self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def lines(self, texts: Iterable[str]) -> None:
        """Print lines."""
        for text in texts:
            self.line(text)

    def begin(self, label: str) -> None:
        """Start the measurement with this label."""
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], description=label, refresh=True)
        elif self._file.isatty():
            print(f"measuring {label} ...", file=sys.stderr, flush=True)

    def step(self) -> None:
        """Count a finished step."""
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], advance=1, refresh=True)


@contextmanager
def shown_progress(file: TextIO, steps: int) -> Iterator[Progress]:
    """Show a bar of `steps` steps below the lines, if `file` is a terminal.

    Without rich, a terminal gets a line per size on stderr instead.
    """
    if not file.isatty() or importlib.util.find_spec("rich") is None:
        yield Progress(file)
        return
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with Bar(*columns, console=Console(file=file), auto_refresh=False, transient=True) as bar:
        bar.add_task("starting", total=steps)
        yield Progress(file, bar)
