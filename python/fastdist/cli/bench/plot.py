"""Draws a report: latency and bus bandwidth over message size."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fastdist.cli.bench.results import Report, Row, floor_us, format_time
from fastdist.cli.sizes import format_size

_COLORS = {
    "fastdist": "#d1495b",
    "gloo": "#7a7f87",
    "openmpi": "#2a6fbb",
    "mpich": "#2e9c6a",
    "impi": "#8a5fbf",
    "torch": "#e07b39",
}
_FLOOR_COLOR = "#9aa0a6"
_TEXT_COLOR = "#30343a"
_GRID_COLOR = "#e6e8eb"
_OURS = {"linewidth": 2.8, "markersize": 5.5, "zorder": 3}
_OTHERS = {"linewidth": 1.5, "markersize": 3, "zorder": 2}
_FLOOR = {"linewidth": 1.6, "linestyle": (0, (4, 3)), "zorder": 1}
_TICKS = 7


def write_plot(report: Report, path: Path) -> None:
    """Draw a report into a file of any type that matplotlib writes."""
    figure = _figure(report)
    figure.suptitle(_title(report), x=0.01, ha="left", color=_TEXT_COLOR, fontsize=12)
    figure.savefig(path, dpi=150)


def to_svg(report: Report) -> str:
    """Draw a report as an SVG element without a background, in a page's font and colors."""
    from matplotlib import rc_context

    file = io.StringIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    with rc_context({"svg.fonttype": "none"}):
        _figure(report).savefig(file, format="svg", transparent=True, metadata=nothing)
    svg = file.getvalue().partition("<svg ")[2]
    for color, name in ((_TEXT_COLOR, "text"), (_GRID_COLOR, "grid"), (_FLOOR_COLOR, "muted")):
        svg = svg.replace(color, f"var(--{name})")
    return f'<svg role="img" aria-label="time and bus bandwidth by size" {svg}'


def _title(report: Report) -> str:
    case = report.rows[0].case
    redop = f" {case.redop}" if case.redop else ""
    title = f"{case.collective}, {case.dtype}{redop}, {report.ranks} ranks, {case.array} arrays"
    where = report.machine_text
    if report.placement is not None:
        where = f"{report.placement}, CUDA {report.machine['cuda driver']}"
    return f"{title} in Python, {report.copy_gb_per_s:.0f} GB/s copy bandwidth\n{where}"


def _figure(report: Report) -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.8), layout="constrained")
    latency, bandwidth = figure.subplots(1, 2)
    _draw_curves(report, latency, lambda row, time_us: time_us)
    _draw_curves(report, bandwidth, Row.busbw)
    for axes, title, tick in (
        (latency, "Latency (p50): lower is better", lambda us, _: format_time(us)),
        (bandwidth, "Bus bandwidth, GB/s: higher is better", lambda speed, _: f"{speed:g}"),
    ):
        axes.set_title(title, loc="left", fontsize=11, color=_TEXT_COLOR)
        axes.yaxis.set_major_formatter(tick)
    handles, labels = latency.get_legend_handles_labels()
    style = {"frameon": False, "labelcolor": _TEXT_COLOR, "ncols": 4}
    figure.legend(handles[::-1], labels[::-1], loc="outside lower center", **style)
    return figure


def _draw_curves(report: Report, axes: Any, value: Callable[[Row, float], float]) -> None:
    """Draw what `value` makes of times, for each engine and the floor, over the size."""
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    ours, *others = report.engines
    for name in (*others, ours):
        both = [(row, m) for row in report.rows for m in row.measurements if m.engine == name]
        shown = [(row, measured) for row, measured in both if not measured.unsupported]
        sizes = [row.case.bytes for row, _ in shown]
        values = [value(row, measured.p50_us) for row, measured in shown]
        style = {"color": _COLORS[name], **(_OURS if name == ours else _OTHERS)}
        axes.plot(sizes, values, marker="o", label=report.engines[name], **style)
    low, high = axes.get_ylim()
    rows = [row for row in report.rows if row.has_floor]
    # By the copies of all rows: a straight line.
    floor = [value(row, floor_us(row.case, report.ranks, report.copy_gb_per_s)) for row in rows]
    if floor:
        sizes = [row.case.bytes for row in rows]
        axes.plot(sizes, floor, color=_FLOOR_COLOR, label="memory floor", **_FLOOR)
    axes.set_ylim(low, max(high, 1.5 * max(floor, default=0.0)))
    sizes = sorted({row.case.bytes for row in report.rows})
    shown_sizes = sizes[:: -(-len(sizes) // _TICKS)]
    axes.set_xticks(shown_sizes, [format_size(size) for size in shown_sizes])
    axes.minorticks_off()
    axes.grid(True, color=_GRID_COLOR, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=_TEXT_COLOR, length=0)
    axes.spines[:].set_visible(False)
