"""Draws when each rank came to the last collectives: as text, PNG or HTML."""

from __future__ import annotations

import html
import importlib.util
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from fastdist.recorder.diagnosis import Diagnosis
from fastdist.recorder.observation import ObservedRank
from fastdist.recorder.ring import Call
from fastdist.recorder.words import seconds, short

_MOST = 60
_BARS = " ▁▂▃▄▅▆▇█"
_ABSENT = "·"
_LEAST_S = 1e-4  # ranks that come this close together come at the same time


class Arrivals(NamedTuple):
    """A collective, and how many seconds after the first rank the ranks came that have come."""

    call: Call
    came_s: dict[int, float]


def check_plot(path: Path) -> None:
    """Check that `write_plot` can write such a file."""
    if path.suffix not in (".png", ".html"):
        raise ValueError(f"--plot {path}: expected a file.png or a file.html")
    if path.suffix == ".png" and importlib.util.find_spec("matplotlib") is None:
        raise ImportError("--plot needs matplotlib for .png: pip install matplotlib; or use .html")


def write_plot(diagnosis: Diagnosis, path: Path) -> None:
    """Draw the arrivals into a file; see `check_plot`."""
    shown = arrivals(diagnosis.observation.ranks)
    ranks = [each.rank for each in diagnosis.observation.ranks]
    if path.suffix == ".html":
        path.write_text(_page(diagnosis.sentence, shown, ranks), "utf-8")
    else:
        _draw(diagnosis.sentence, shown, ranks, path)


def arrivals(ranks: Sequence[ObservedRank]) -> list[Arrivals]:
    """Return the arrivals at the last collectives of the communicator with most ranks."""
    by_call: dict[tuple[int, int], dict[int, Call]] = defaultdict(dict)
    for each in ranks:
        for call in each.records.calls:
            if not call.signature.is_pairwise:
                by_call[call.place][each.rank] = call
    if not by_call:
        return []
    every = (call for calls in by_call.values() for call in calls.values())
    key = max(every, key=lambda call: (call.member.size, call.entered_s)).member.key
    shown = []
    for place in sorted(place for place in by_call if place[0] == key)[-_MOST:]:
        calls = by_call[place]
        first_s = min(call.entered_s for call in calls.values())
        came_s = {rank: call.entered_s - first_s for rank, call in sorted(calls.items())}
        shown.append(Arrivals(next(iter(calls.values())), came_s))
    return shown


def _most_s(shown: Sequence[Arrivals]) -> float:
    return max([_LEAST_S, *(late_s for each in shown for late_s in each.came_s.values())])


def to_text(ranks: Sequence[ObservedRank]) -> str:
    """Draw the arrivals with block characters: a row per rank, a column per collective."""
    shown = arrivals(ranks)
    if not shown:
        return "no collectives were recorded\n"
    most_s = _most_s(shown)
    lines = [
        f"arrivals at the last {len(shown)} collectives, after the first rank "
        f"(█ {seconds(most_s)}, {_ABSENT} has not come)"
    ]
    width = max(len(str(each.rank)) for each in ranks)
    for each in ranks:
        bars = "".join(_bar(arrival.came_s.get(each.rank), most_s) for arrival in shown)
        lines.append(f"rank {each.rank:>{width}} {bars}")
    return "\n".join(lines) + "\n"


def _bar(late_s: float | None, most_s: float) -> str:
    if late_s is None:
        return _ABSENT
    return _BARS[round(late_s / most_s * (len(_BARS) - 1))]


def _draw(sentence: str, shown: Sequence[Arrivals], ranks: Sequence[int], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    axes = figure.subplots()
    for rank in ranks:
        points = [(i, a.came_s[rank] * 1e3) for i, a in enumerate(shown) if rank in a.came_s]
        if points:
            axes.plot(*zip(*points, strict=True), "o-", markersize=3, label=f"rank {rank}")
    axes.set_xlabel("collective")
    axes.set_ylabel("ms after the first rank")
    axes.set_title(sentence, fontsize=9, wrap=True)
    if len(ranks) <= 16:
        axes.legend(fontsize=8)
    figure.savefig(path)


def _page(sentence: str, shown: Sequence[Arrivals], ranks: Sequence[int]) -> str:
    most_s = _most_s(shown)
    labels = [f"{each.call.signature} {short(each.call.site)}" for each in shown]
    heads = "".join(f"<th title='{html.escape(label)}'></th>" for label in labels)
    rows = "".join(
        f"<tr><th>rank {rank}</th>"
        + "".join(_cell(each.came_s.get(rank), most_s) for each in shown)
        + "</tr>"
        for rank in ranks
    )
    return (
        "<!doctype html><meta charset=utf-8><title>fastdist why</title>"
        "<style>body{font:14px sans-serif;margin:2em}td{width:12px;height:18px}"
        "th{font-weight:normal;text-align:right;padding-right:.5em}</style>"
        f"<p>{html.escape(sentence)}</p><table><tr><th></th>{heads}</tr>{rows}</table>"
        f"<p>A column is a collective; the darker a rank's cell, the later it came "
        f"(darkest: {seconds(most_s)} after the first). Outlined: it has not come.</p>\n"
    )


def _cell(late_s: float | None, most_s: float) -> str:
    if late_s is None:
        return "<td style='outline:1px solid #d1495b' title='has not come'></td>"
    share = late_s / most_s
    return (
        f"<td style='background:rgba(209,73,91,{0.08 + 0.92 * share:.2f})' "
        f"title='{seconds(late_s)}'></td>"
    )
