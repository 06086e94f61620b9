"""Prints what a trace tells."""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from fastdist.cli.command import check_plot
from fastdist.processes.terminal import fitted, show
from fastdist.recorder.timeline import RankTimeline, align, find_late
from fastdist.recorder.trace_file import read_trace, write_trace
from fastdist.recorder.words import columns

_PHASES = ("data", "forward", "backward", "optimizer", "saving", "user")
_BARS = "▁▂▃▄▅▆▇█"
_WIDTH = 60


def run(options: argparse.Namespace) -> None:
    """Print what traces tell, and write the files that were asked for."""
    if options.plot is not None:
        check_plot(options.plot)
    ranks = join([read_trace(path) for path in options.files])
    if options.output is not None:
        write_trace(options.output, ranks)
    if options.plot is not None:
        _draw(ranks, options.plot)
    if options.json:
        show(json.dumps(_facts(ranks), indent=2) + "\n")
    else:
        show(fitted(describe(ranks), sys.stdout))


def join(machines: Sequence[list[RankTimeline]]) -> list[RankTimeline]:
    """Join the ranks of several machines, on the clock of the first."""
    for ranks in machines[1:]:
        if machines[0]:
            align(ranks, machines[0][0])
    joined = sorted((rank for ranks in machines for rank in ranks), key=lambda each: each.rank)
    if not joined:
        raise ValueError(
            "the trace is empty: no process of the job has called fastdist.init or made a "
            "strategy, or all ended within 0.02 s after it"
        )
    for one, other in itertools.pairwise(joined):
        if one.rank == other.rank:
            raise ValueError(f"two traces have rank {one.rank}: are they of different jobs?")
    return joined


def describe(ranks: Sequence[RankTimeline]) -> str:
    """Describe a trace: a sentence on steps, who was waited for, and a table of ranks."""
    lines = [_summary(ranks)]
    lines += [str(late) for late in find_late(ranks)[:3]]
    lines.append("")
    lines += _table(ranks)
    if any(rank.steps_s() for rank in ranks):
        lines += ["", *_pictures(ranks)]
    lost = sum(rank.lost_calls for rank in ranks)
    if lost:
        lines.append(f"{lost:,} calls were overwritten before they could be read")
    return "\n".join(lines) + "\n"


def _summary(ranks: Sequence[RankTimeline]) -> str:
    calls = sum(len(rank.calls) for rank in ranks)
    steps = ranks[0].steps_s()
    ranks_text = f"{len(ranks)} rank{'s' * (len(ranks) > 1)}"
    if not steps:
        return f"{ranks_text}, {calls:,} calls; no steps of a strategy were recorded"
    middle, slow = np.percentile(steps, (50, 95))
    return (
        f"{ranks_text}, {len(steps):,} steps of {_ms(middle)} ms (95 % of them within "
        f"{_ms(slow)}), {calls:,} calls"
    )


def _table(ranks: Sequence[RankTimeline]) -> list[str]:
    rows = [["rank", "step", *_PHASES, "waited"], ["", "ms", *["s"] * len(_PHASES), "s"]]
    for rank in ranks:
        steps = rank.steps_s()
        phases = rank.phases_s()
        row = [str(rank.rank), _ms(float(np.median(steps))) if steps else "-"]
        row += [f"{phases.get(name, 0.0):.3g}" for name in _PHASES]
        rows.append([*row, f"{rank.waiting_s():.3g}"])
    return columns(rows, str.rjust)


def _pictures(ranks: Sequence[RankTimeline]) -> list[str]:
    """Draw the time of steps, by rank, with block characters."""
    means = [_in_columns(np.array(rank.steps_s())) for rank in ranks]
    most = max(float(each.max()) for each in means)
    lines = [f"time of steps (█ {_ms(most)} ms)"]
    for rank, each in zip(ranks, means, strict=True):
        heights = (each / most * (len(_BARS) - 1)).round().astype(int)
        lines.append(f"rank {rank.rank} " + "".join(_BARS[height] for height in heights))
    return lines


def _in_columns(steps: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    parts = np.array_split(steps, min(_WIDTH, max(len(steps), 1)))
    return np.array([part.mean() if len(part) else 0.0 for part in parts])


def _draw(ranks: Sequence[RankTimeline], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    axes = figure.subplots()
    for rank in ranks:
        axes.plot([1e3 * step for step in rank.steps_s()], label=f"rank {rank.rank}", linewidth=1)
    axes.set_xlabel("step")
    axes.set_ylabel("ms")
    axes.set_ylim(bottom=0)
    late = find_late(ranks)
    axes.set_title(str(late[0]) if late else _summary(ranks), fontsize=9, wrap=True)
    if len(ranks) <= 16:
        axes.legend(fontsize=8)
    figure.savefig(path)


def _facts(ranks: Sequence[RankTimeline]) -> dict[str, Any]:
    return {
        "ranks": [
            {
                "rank": rank.rank,
                "label": rank.label,
                "calls": len(rank.calls),
                "lost_calls": rank.lost_calls,
                "steps_s": rank.steps_s(),
                "phases_s": rank.phases_s(),
                "waiting_s": rank.waiting_s(),
            }
            for rank in ranks
        ],
        "late": [asdict(late) for late in find_late(ranks)],
    }


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g}"
