"""Prints a server's activity as lines of text, for logs, or of JSON, for programs."""

from __future__ import annotations

import datetime
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from fastdist.cli.doctor.facts import format_bytes
from fastdist.cli.serve.reading import Reading


@contextmanager
def shown_lines(about: Mapping[str, str], *, as_json: bool) -> Iterator[Callable[[Reading], None]]:
    """Yield a function that prints a line about a reading to stdout.

    Args:
        about: the server's addresses; part of every line of JSON, else printed once at the start.
        as_json: print lines of JSON.
    """
    output = _Output()
    if as_json:
        yield lambda reading: output.write(as_json_line(reading, about))
        return
    for what, where in about.items():
        output.write(f"{what}: {where}")
    yield lambda reading: output.write(as_text(reading))


class _Output:
    def __init__(self) -> None:
        self._is_read = True

    def write(self, line: str) -> None:
        # Not via sys.stdout, which would block on its unwritten buffer when the process exits.
        data = memoryview(f"{line}\n".encode())
        try:
            while self._is_read and data:
                data = data[os.write(1, data) :]
        except OSError as error:
            self._is_read = False
            sys.stderr.write(
                f"fastdist serve: cannot write to stdout: {error.strerror}; continues without\n"
            )


def as_json_line(reading: Reading, about: Mapping[str, str]) -> str:
    """Format a line for programs: the server's statistics, the time, and the addresses."""
    line = {"time": time.time(), **about, **reading.stats}
    return json.dumps(line | {"requests_per_s": round(reading.requests_per_s, 3)})


def as_text(reading: Reading) -> str:
    """Format a line for people."""
    stats = reading.stats
    parts = [
        f"up {datetime.timedelta(seconds=int(stats['uptime_s']))}",
        f"{len(stats['objects'])} objects",
        f"{reading.rows:,} rows",
        format_bytes(reading.nbytes),
        f"{reading.steps:,} steps",
        f"{reading.requests_per_s:,.1f} requests/s",
    ]
    for what in ("repeated", "malformed"):
        parts += [f"{stats[what]:,} {what}"] if stats[what] else []
    pushes = sum(reading.staleness.values())
    shares = (f"{steps}: {count / pushes:.0%}" for steps, count in reading.staleness.items())
    return ", ".join(parts) + (f"; staleness {', '.join(shares)}" if pushes else "")
