"""Draws a report: latency and bus bandwidth over message size; a single case as bars."""

from __future__ import annotations

import importlib.util
import io
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from fastdist.cli.bench.cases import format_size
from fastdist.cli.bench.peers import peer_of, tuned_settings
from fastdist.cli.bench.results import Measurement, Report, Row, busbw, floor_us
from fastdist.cli.bench.summary import format_time

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
_TICKS = 7
_FIGURES: dict[str, tuple[str, Callable[[float, object], str]]] = {
    "p50_us": ("Latency (p50): lower is better", lambda us, _: format_time(us)),
    "busbw": ("Bus bandwidth, GB/s: higher is better", lambda speed, _: f"{speed:g}"),
}


def check_plot(path: Path) -> None:
    """Check that `write_plot` can write such a file.

    Raises:
        ImportError: matplotlib is not installed; the message has the command that installs it.
        ValueError: matplotlib does not write files of this type.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ImportError("--plot needs matplotlib: pip install matplotlib")
    from matplotlib.backend_bases import FigureCanvasBase

    types = sorted(FigureCanvasBase.get_supported_filetypes())
    if path.suffix.lstrip(".").lower() not in types:
        raise ValueError(f"--plot {path}: expected a file type out of {', '.join(types)}")


def write_plot(report: Report, path: Path) -> None:
    """Draw a report into a file of any type that matplotlib writes; raise as `check_plot`."""
    check_plot(path)
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.8), layout="constrained")
    if len(report.rows) == 1:
        _draw_bars(report, figure.subplots())
    else:
        latency, bandwidth = figure.subplots(1, 2)
        _draw_curves(report, latency, "p50_us")
        _draw_curves(report, bandwidth, "busbw")
        handles, labels = latency.get_legend_handles_labels()
        handles, labels = handles[::-1], labels[::-1]
        style = {"frameon": False, "labelcolor": _TEXT_COLOR, "ncols": 6}
        figure.legend(handles, labels, loc="outside lower center", **style)
    figure.suptitle(_title(report), x=0.01, ha="left", color=_TEXT_COLOR, fontsize=12)
    figure.savefig(path, dpi=150)


def curves_svg(report: Report) -> tuple[str, str]:
    """Draw latency and bandwidth as two SVG elements for a page; see `_svg`."""
    return (
        _svg(lambda axes: _draw_curves(report, axes, "p50_us"), 3.4, "time by size"),
        _svg(lambda axes: _draw_curves(report, axes, "busbw"), 3.4, "bus bandwidth by size"),
    )


def bars_svg(report: Report) -> str:
    """Draw a single case as an SVG element for a page; see `_svg`."""
    height = 1.0 + 0.25 * (1 + len(report.rows[0].others))
    return _svg(lambda axes: _draw_bars(report, axes), height, report.rows[0].case.title)


def legend_svgs(report: Report) -> Iterator[tuple[str, str]]:
    """Yield the line and the name of each engine, and of the floor, for a page's legend."""
    for name, version in report.engines.items():
        if _is_tuned(name):
            yield _line_svg(_color(name), 1.5, "2 2"), f"{version}, tuned"
        else:
            yield _line_svg(_color(name), 3, "none"), version
    if any(row.has_floor for row in report.rows):
        yield _line_svg("var(--muted)", 2, "6 4"), _floor_name(report)


def _line_svg(color: str, width: float, dashes: str) -> str:
    return (
        f"<svg viewBox='0 0 32 8' aria-hidden='true'><path d='M0 4H32' stroke='{color}' "
        f"stroke-width='{width}' stroke-dasharray='{dashes}'/></svg>"
    )


def _svg(draw: Callable[[Any], None], height: float, label: str) -> str:
    """Return a chart without a background, in the page's font.

    The page's style gives the colors `--text`, `--grid` and `--muted` their values.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.2, height), layout="constrained")
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
    case = report.rows[0].case
    machine = report.machine
    what = f"{case.collective} of {case.model}'s gradients" if case.model else case.collective
    redop = f" {case.redop}" if case.redop else ""
    if report.placement is not None:
        return (
            f"{what}, {case.dtype}{redop}, {report.ranks} ranks, {case.array} arrays\n"
            f"{report.placement}, CUDA {machine['cuda driver']}, "
            f"{report.copy_gb_per_s:.0f} GB/s copy bandwidth"
        )
    return (
        f"{what}, {case.dtype}{redop}, {report.ranks} ranks, {case.array} arrays in Python\n"
        f"{machine['processor']}, {machine['cores']} cores, {machine['cache']} cache, "
        f"{report.copy_gb_per_s:.0f} GB/s copy bandwidth, Linux {machine['kernel']}"
    )


def _draw_curves(report: Report, axes: Any, figure: str) -> None:
    """Draw one line per engine and the floor, over the size."""
    others = report.rows[0].others
    for index, other in enumerate(others):
        column = [row.others[index] for row in report.rows]
        _draw_engine(report, axes, column, figure, other.engine)
    _draw_engine(report, axes, [row.ours for row in report.rows], figure, "fastdist")
    low, high = axes.get_ylim()
    rows = [row for row in report.rows if row.has_floor]
    floor = [_floor(report, row, figure) for row in rows]
    if floor:
        sizes = [row.case.bytes for row in rows]
        style = {"color": _FLOOR_COLOR, "linestyle": (0, (4, 3)), "linewidth": 1.6, "zorder": 1}
        axes.plot(sizes, floor, **style, label=_floor_name(report))
    axes.set_ylim(low, max(high, 1.5 * max(floor, default=0.0)))
    sizes = sorted({row.case.bytes for row in report.rows})
    shown = sizes[:: -(-len(sizes) // _TICKS)]
    axes.set_xticks(shown, [format_size(size) for size in shown])
    axes.minorticks_off()
    title, tick = _FIGURES[figure]
    _style(axes, title)
    axes.yaxis.set_major_formatter(tick)


def _draw_engine(
    report: Report, axes: Any, column: Sequence[Measurement], figure: str, name: str
) -> None:
    points = [
        (row.case.bytes, getattr(measured, figure))
        for row, measured in zip(report.rows, column, strict=True)
        if not measured.unsupported
    ]
    ours = name == "fastdist"
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.plot(
        [size for size, _ in points],
        [value for _, value in points],
        color=_color(name),
        linestyle=(0, (1, 1)) if _is_tuned(name) else "-",
        linewidth=2.8 if ours else 1.5,
        marker="o",
        markersize=5.5 if ours else 3,
        zorder=3 if ours else 2,
        label=report.engines[name],
    )


def _color(engine: str) -> str:
    return _COLORS[peer_of(engine)]


def _is_tuned(engine: str) -> bool:
    return bool(tuned_settings(engine))


def _floor(report: Report, row: Row, figure: str) -> float:
    least_us = row.floor_us
    if not _is_link(report):  # by the copies of all rows: a straight line
        least_us = floor_us(row.case, report.ranks, report.copy_gb_per_s)
    if figure == "p50_us" or not least_us:
        return least_us
    return busbw(row.case, report.ranks, 1e3 * least_us)


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
    ways = [way for way in (row.ours, *row.others) if not way.unsupported]
    ways.reverse()
    names = [way.engine for way in ways]
    bars = axes.barh(
        names,
        [way.p50_us for way in ways],
        color=[_color(name) for name in names],
        height=0.65,
    )
    axes.bar_label(bars, fmt=format_time, padding=4, color=_TEXT_COLOR)
    if row.has_floor:
        axes.axvline(row.floor_us, color=_FLOOR_COLOR, linestyle=(0, (4, 3)), linewidth=1.6)
        at = {"xycoords": ("data", "axes fraction"), "va": "bottom", "color": _TEXT_COLOR}
        axes.annotate(f" {_floor_name(report)}", (row.floor_us, 1.0), **at)
    _style(axes, "")
    axes.grid(False, axis="y")
    axes.xaxis.set_major_formatter(lambda us, _: format_time(us) if us else "0")
    axes.set_xlabel("time (p50): lower is better", color=_TEXT_COLOR)
