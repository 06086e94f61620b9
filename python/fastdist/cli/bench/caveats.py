"""Warnings about figures that a busy machine or too few calls make unreliable."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from fastdist.cli.bench.machine import usable_cores

# Quiet machines give ratios of p99 to p50 from 1.1 to 3.
_WIDE_SPREAD = 5.0
_FEW_CALLS = 20
# A core that the ranks need is busy half of the time.
_BUSY_CORES = 0.5


def load_average() -> float:
    """Return the machine's load average over the last minute."""
    return os.getloadavg()[0]


def load_warnings(load: float, ranks: int) -> list[str]:
    """Return a warning if other programs keep cores busy that the ranks need.

    Args:
        load: load average before the ranks were started.
        ranks: world size.
    """
    cores = usable_cores()
    if load <= max(0, cores - ranks) + _BUSY_CORES:
        return []
    return [
        f"busy machine: load average {load:.1f} before the run, {cores} cores for {ranks} ranks; "
        "other programs slow the calls down"
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
