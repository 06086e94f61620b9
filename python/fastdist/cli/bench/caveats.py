"""Warnings about figures that a busy machine or too few calls make unreliable."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence

from fastdist.cli.bench.machine import usable_cores

# Quiet machines give ratios of p99 to p50 from 1.1 to 3.
_WIDE_SPREAD = 5.0
_FEW_CALLS = 20
# A core that the ranks need is busy half of the time.
_MOST_BUSY_CORES = 0.5
_LOOK_S = 0.25
_IDLE, _IO_WAIT, _GUEST = 3, 4, 8  # columns of /proc/stat; guests' time is in the first two as well


def busy_cores() -> float:
    """Return how many of the usable cores other programs keep busy, measured for 0.25 s."""
    before = _busy_ticks()
    start = time.perf_counter()
    time.sleep(_LOOK_S)
    ticks = _busy_ticks() - before
    return ticks / os.sysconf("SC_CLK_TCK") / (time.perf_counter() - start)


def _busy_ticks() -> int:
    names = {f"cpu{core}" for core in os.sched_getaffinity(0)}
    with open("/proc/stat", encoding="ascii") as file:
        rows = [line.split() for line in file]
    ticks = [[int(field) for field in row[1:]][:_GUEST] for row in rows if row[0] in names]
    return sum(sum(core) - core[_IDLE] - core[_IO_WAIT] for core in ticks)


def busy_warnings(busy: float, ranks: int) -> list[str]:
    """Return a warning if other programs keep cores busy that the ranks need.

    Args:
        busy: busy cores before the ranks were started.
        ranks: world size.
    """
    cores = usable_cores()
    if busy <= max(0, cores - ranks) + _MOST_BUSY_CORES:
        return []
    return [
        f"busy machine: other programs kept {busy:.1f} of {cores} cores busy before the run, "
        f"which {ranks} ranks need"
    ]


def call_warnings(
    labels: Sequence[str], spreads: Sequence[float], calls: Sequence[int]
) -> list[str]:
    """Return warnings about lines of a table.

    Args:
        labels: name of each line.
        spreads: p99 / p50 of each line.
        calls: number of timed calls of each line.
    """
    wide = _named(labels, spreads, lambda spread: spread > _WIDE_SPREAD)
    few = _named(labels, calls, lambda number: number < _FEW_CALLS)
    warnings = []
    if wide:
        warnings.append(
            f"busy machine: p99 is more than {_WIDE_SPREAD:g} times p50 at {wide}; other programs "
            "took the cores during calls"
        )
    if few:
        warnings.append(
            f"too few calls: fewer than {_FEW_CALLS} at {few}; --time-s or --iters gives more"
        )
    return warnings


def _named(
    labels: Sequence[str], values: Sequence[float], is_named: Callable[[float], bool]
) -> str:
    named = [label for label, value in zip(labels, values, strict=True) if is_named(value)]
    if len(named) == len(labels) > 1:
        return "all of them"
    return ", ".join(dict.fromkeys(named))
