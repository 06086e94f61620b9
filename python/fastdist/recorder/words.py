"""Ranks, lines, times and tables in words."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Callable, Collection, Iterable, Sequence

from fastdist.processes.process import signal_name
from fastdist.recorder.observation import ObservedRank
from fastdist.recorder.ring import Call
from fastdist.recorder.waits import UNSEEN


def names(ranks: Iterable[int]) -> str:
    """Name ranks: "rank 3", "ranks 0, 2 and 5"."""
    known = sorted({rank for rank in ranks if rank != UNSEEN})
    if not known:
        return "a rank that cannot be seen from here"
    if len(known) == 1:
        return f"rank {known[0]}"
    if len(known) > 3 and known[-1] - known[0] == len(known) - 1:
        return f"ranks {known[0]} to {known[-1]}"
    if len(known) > 8:
        return f"ranks {ranges(known)}"
    return f"ranks {', '.join(map(str, known[:-1]))} and {known[-1]}"


def ranges(numbers: Sequence[int]) -> str:
    """Return numbers in ascending order as text: "0-3, 7"."""
    groups = itertools.groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])
    runs = [[number for _, number in group] for _, group in groups]
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)


def verb(ranks: Collection[object], one: str, several: str) -> str:
    """Choose the form of a verb."""
    return one if len(ranks) == 1 else several


def they(ranks: Collection[int], one: str, several: str) -> str:
    """Begin a sentence: "rank 3 waits", "ranks 0 and 2 wait"."""
    return f"{names(ranks)} {verb(ranks, one, several)}"


def short(line: str) -> str:
    """Shorten "/home/me/train.py:12 in step" to "train.py:12 in step"; "" stays."""
    return re.sub(r"^.*/(?=[^/]*:\d+ in )", "", line)


def at(line: str) -> str:
    """Return " at train.py:12 in step"; "" for an unknown line."""
    return f" at {short(line)}" if line else ""


def in_words(call: Call | None) -> str:
    """Return "all_reduce(…) at train.py:12 in step"; "" without a call."""
    return "" if call is None else f"{call.signature}{at(call.site)}"


def seconds(value_s: float) -> str:
    """Write a time: "4 ms", "0.5 s", "12 s", "3 min", "2.5 h"."""
    if value_s < 0.0995:
        return f"{max(value_s, 0) * 1e3:.0f} ms"
    if value_s < 9.95:
        return f"{value_s:.1f} s"
    if value_s < 120:
        return f"{value_s:.0f} s"
    return f"{value_s / 60:.0f} min" if value_s < 7200 else f"{value_s / 3600:.1f} h"


def columns(rows: Sequence[Sequence[str]], pad: Callable[[str, int], str] = str.ljust) -> list[str]:
    """Lay out the rows of a table, all of the same length, in columns; return its lines."""
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    return ["  ".join(map(pad, row, widths)).rstrip() for row in rows]


def how_it_died(rank: ObservedRank) -> str:
    """Describe the end of a rank: ", killed by SIGKILL", ": ValueError: … at train.py:9"."""
    ending = rank.ending
    if ending is not None and ending.error:
        return f": {ending.error}: {ending.message}".removesuffix(": ") + at(ending.line)
    if ending is not None:
        return f", {ending.message}"
    if rank.process is not None and rank.process.status is not None:
        code = os.waitstatus_to_exitcode(rank.process.status)
        how = f"by signal {signal_name(-code)}" if code < 0 else f"with exit code {code}"
        return f", ended {how}"
    return " without an exception, as after kill -9 or a crash"
