"""Draws a report: latency and bus bandwidth over message size; a single case as bars."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from fastdist.cli.bench.peers import peer_of, tuned_settings
from fastdist.cli.bench.results import Report, Row, floor_us, format_time
from fastdist.cli.sizes import format_size

_COLORS = {
    "fastdist": "#d1495b",
    "gloo": "#7a7f87",
    "mlx": "#b59410",
    "deepspeed": "#3c8c93",
    "openmpi": "#2a6fbb",
    "mpich": "#2e9c6a",
    "impi": "#8a5fbf",
    "torch": "#e07b39",
}
_FLOOR_COLOR = "#9aa0a6"
_TEXT_COLOR = "#30343a"
_GRID_COLOR = "#e6e8eb"
_FLOOR_LINE = {"color": _FLOOR_COLOR, "linestyle": (0, (4, 3)), "linewidth": 1.6}
_TICKS = 7
_FIGURES: dict[str, tuple[str, Callable[[float, object], str]]] = {
    "p50_us": ("Latency (p50): lower is better", lambda us, _: format_time(us)),
    "busbw": ("Bus bandwidth, GB/s: higher is better", lambda speed, _: f"{speed:g}"),
}


def write_plot(report: Report, path: Path) -> None:
    """Draw a report into a file of any type that matplotlib writes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.8), layout="constrained")
    if len(report.rows) == 1:
        _draw_bars(report, figure.subplots())
    else:
        latency, bandwidth = figure.subplots(1, 2)
        _draw_curves(report, latency, "p50_us")
        _draw_curves(report, bandwidth, "busbw")
        handles, labels = latency.get_legend_handles_labels()
        style = {"frameon": False, "labelcolor": _TEXT_COLOR, "ncols": 6}
        figure.legend(handles[::-1], labels[::-1], loc="outside lower center", **style)
    figure.suptitle(_title(report), x=0.01, ha="left", color=_TEXT_COLOR, fontsize=12)
    figure.savefig(path, dpi=150)


def curves_svg(report: Report) -> str:
    """Draw latency and bandwidth as two SVG elements for a page."""
    titles = {"p50_us": "time by size", "busbw": "bus bandwidth by size"}
    draw = partial(_draw_curves, report)
    return "".join(_svg(partial(draw, figure=name), titles[name]) for name in titles)


def legend(report: Report) -> Iterator[tuple[str, float, str, str]]:
    """Yield color, width, dashes and name of each engine's line, and of the floor's."""
    for name, version in report.engines.items():
        if tuned_settings(name):
            yield _COLORS[peer_of(name)], 1.5, "2 2", f"{version}, tuned"
        else:
            yield _COLORS[peer_of(name)], 3, "none", version
    if any(row.has_floor for row in report.rows):
        yield "var(--muted)", 2, "6 4", _floor_name(report)


def _svg(draw: Callable[[Any], None], label: str) -> str:
    """Return a chart without a background, in the page's font and colors."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.2, 3.4), layout="constrained")
    draw(figure.subplots())
    file = io.StringIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": label}):
        figure.savefig(file, format="svg", transparent=True, metadata=nothing)
    svg = re.sub(r' id="[a-z0-9]+_\d+"', "", file.getvalue())  # the same in all charts
    for color, name in ((_TEXT_COLOR, "text"), (_GRID_COLOR, "grid"), (_FLOOR_COLOR, "muted")):
        svg = svg.replace(color, f"var(--{name})")
    return f'<svg role="img" aria-label="{label}" ' + svg.partition("<svg ")[2]


def _title(report: Report) -> str:
    case, machine, placement = report.rows[0].case, report.machine, report.placement
    what = f"{case.collective} of {case.model}'s gradients" if case.model else case.collective
    redop = f" {case.redop}" if case.redop else ""
    title = f"{what}, {case.dtype}{redop}, {report.ranks} ranks, {case.array} arrays"
    copies = f"{report.copy_gb_per_s:.0f} GB/s copy bandwidth"
    if placement is not None:
        return f"{title}\n{placement}, CUDA {machine['cuda driver']}, {copies}"
    return (
        f"{title} in Python\n{machine['processor']}, {machine['cores']} cores, "
        f"{machine['cache']} cache, {copies}, Linux {machine['kernel']}"
    )


def _draw_curves(report: Report, axes: Any, figure: str) -> None:
    """Draw one line per engine and the floor, over the size."""

    def value(row: Row, time_us: float) -> float:
        return time_us if figure == "p50_us" else row.busbw(time_us)

    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    ours, *others = zip(*(row.measurements for row in report.rows), strict=True)
    for column in (*others, ours):
        name = column[0].engine
        shown = [(r, m) for r, m in zip(report.rows, column, strict=True) if not m.unsupported]
        axes.plot(
            [row.case.bytes for row, _ in shown],
            [value(row, measured.p50_us) for row, measured in shown],
            color=_COLORS[peer_of(name)],
            linestyle=(0, (1, 1)) if tuned_settings(name) else "-",
            linewidth=2.8 if column is ours else 1.5,
            marker="o",
            markersize=5.5 if column is ours else 3,
            zorder=3 if column is ours else 2,
            label=report.engines[name],
        )
    low, high = axes.get_ylim()
    rows = [row for row in report.rows if row.has_floor]
    if _is_link(report):
        floor = [value(row, row.floor_us) for row in rows]
    else:  # by the copies of all rows: a straight line
        speed = report.copy_gb_per_s
        floor = [value(row, floor_us(row.case, report.ranks, speed)) for row in rows]
    if floor:
        sizes = [row.case.bytes for row in rows]
        axes.plot(sizes, floor, **_FLOOR_LINE, zorder=1, label=_floor_name(report))
    axes.set_ylim(low, max(high, 1.5 * max(floor, default=0.0)))
    sizes = sorted({row.case.bytes for row in report.rows})
    shown_sizes = sizes[:: -(-len(sizes) // _TICKS)]
    axes.set_xticks(shown_sizes, [format_size(size) for size in shown_sizes])
    axes.minorticks_off()
    title, tick = _FIGURES[figure]
    _style(axes, title)
    axes.yaxis.set_major_formatter(tick)


def _floor_name(report: Report) -> str:
    return "speed of the links" if _is_link(report) else "memory floor"


def _is_link(report: Report) -> bool:
    return report.placement is not None and not report.placement.is_shared


def _style(axes: Any, title: str) -> None:
    axes.set_title(title, loc="left", fontsize=11, color=_TEXT_COLOR)
    axes.grid(True, color=_GRID_COLOR, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=_TEXT_COLOR, length=0)
    for side in axes.spines.values():
        side.set_visible(False)


def _draw_bars(report: Report, axes: Any) -> None:
    """Draw the times of a single case, such as a list's or a barrier's."""
    row = report.rows[0]
    times_us = {way.engine: way.p50_us for way in reversed(row.measurements) if not way.unsupported}
    colors = [_COLORS[peer_of(name)] for name in times_us]
    bars = axes.barh(list(times_us), list(times_us.values()), color=colors, height=0.65)
    axes.bar_label(bars, fmt=format_time, padding=4, color=_TEXT_COLOR)
    if row.has_floor:
        axes.axvline(row.floor_us, **_FLOOR_LINE)
        at = {"xycoords": ("data", "axes fraction"), "va": "bottom", "color": _TEXT_COLOR}
        axes.annotate(f" {_floor_name(report)}", (row.floor_us, 1.0), **at)
    _style(axes, "")
    axes.grid(False, axis="y")
    axes.xaxis.set_major_formatter(lambda us, _: format_time(us) if us else "0")
    axes.set_xlabel("time (p50): lower is better", color=_TEXT_COLOR)
