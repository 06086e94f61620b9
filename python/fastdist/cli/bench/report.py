"""Formats a report as a table, line by line, and as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from fastdist.cli.bench.results import Measurement, Report, Row

_COLUMNS = (
    ("bytes", "", 11),
    ("count", "", 11),
    ("type", "", 9),
    ("redop", "", 6),
    ("p50", "us", 10),
    ("p99", "us", 10),
    ("algbw", "GB/s", 7),
    ("busbw", "GB/s", 7),
    ("wrong", "", 6),
    ("floor", "%", 6),
)
# Additional columns on GPUs.
_GPU_COLUMNS = (("host", "us", 9), ("graph", "us", 10))
_LIST_COLUMNS = (
    *(("p50", "us", 11), ("p99", "us", 11), ("algbw", "", 8), ("busbw", "", 8)),
    *(("wrong", "", 7), ("floor", "%", 9)),
)
# Columns that a narrow terminal does not show, in the order in which they are left out.
_SPARE = ("count", "redop", "type")
_LIST_SPARE = ("algbw", "busbw", "floor", "wrong")
_PEER_WIDTH = 10
_RATIO_WIDTH = 7
_WAY_WIDTH = 26
_LIST_RATIO_WIDTH = 9


def heading(report: Report, title: str) -> list[str]:
    """Return the lines above the table: machine, engines, warnings."""
    machine = report.machine
    lines = [
        f"# fastdist bench {title}, {report.ranks} ranks",
        f"# {machine['processor']}, {machine['cores']} cores, {machine['cache']} cache, "
        f"{machine['memory']}; Linux {machine['kernel']}, Python {machine['python']}",
        f"# {', '.join(report.engines.values())}",
    ]
    if report.placement is not None:
        lines.insert(2, f"# {report.placement}; CUDA {machine['cuda driver']}")
    lines += [f"# {name} is not installed: {install}" for name, install in report.missing.items()]
    lines += [f"# {name} failed to start: {reason}" for name, reason in report.failed.items()]
    lines += [f"# warning: {warning}" for warning in report.busy_warnings]
    return [*lines, "#"]


def column_lines(
    others: Sequence[str], on_gpu: bool = False, width: int | None = None
) -> list[str]:
    """Return the lines of column names and units.

    Peers are on the right, or below each row if the terminal's `width` is too small.
    """
    shown = _shown(_columns(on_gpu), _SPARE, width)
    names = "".join(name.rjust(size) for name, _, size in shown)
    units = "".join(unit.rjust(size) for _, unit, size in shown)
    host = "host".rjust(_GPU_COLUMNS[0][-1]) if on_gpu else ""
    if not _fits_beside(names, others, host, width):
        return [names, units, _below(shown, "peer", "us", "ratio", host)]
    for other in others:
        room = _other_width(other)
        names += "  " + other.center(room + len(host))
        units += "  " + "us".rjust(room - _RATIO_WIDTH) + "ratio".rjust(_RATIO_WIDTH) + host
    return [names.rstrip(), units.rstrip()]


def row_lines(row: Row, width: int | None = None) -> list[str]:
    """Format a row of the table: one line, or one more for each peer as in `column_lines`."""
    case, ours = row.case, row.ours
    shown = _shown(_columns(ours.host_us is not None), _SPARE, width)
    cells = {"bytes": str(case.bytes), "count": str(case.count), "type": case.dtype}
    cells |= {"redop": case.redop or "none", **_cells(row, ours)}
    lines = ["".join(cells[name].rjust(size) for name, _, size in shown)]
    host_width = 0 if ours.host_us is None else _GPU_COLUMNS[0][-1]
    names = [other.engine for other in row.others]
    is_beside = _fits_beside(lines[0], names, " " * host_width, width)
    for other in row.others:
        ratio = row.times_as_fast(other)
        time = _time(other.p50_us) if ratio else "n/a"
        times = f"{_three_digits(ratio)}x" if ratio else ""
        host = _time(other.host_us).rjust(host_width) if host_width else ""
        if is_beside:
            room = _other_width(other.engine) - _RATIO_WIDTH
            lines[0] += "  " + time.rjust(room) + times.rjust(_RATIO_WIDTH) + host
        else:
            lines.append(_below(shown, other.engine, time, times, host))
    return [line.rstrip() for line in lines]


def _columns(on_gpu: bool) -> tuple[tuple[str, str, int], ...]:
    return (*_COLUMNS, *_GPU_COLUMNS) if on_gpu else _COLUMNS


def _shown(
    columns: Sequence[tuple[str, str, int]], spare: Sequence[str], room: int | None
) -> list[tuple[str, str, int]]:
    """Return the columns that fit: leave out those in `spare` until the others do."""
    shown = list(columns)
    for name in spare:
        if room is None or sum(width for *_, width in shown) <= room:
            break
        shown = [column for column in shown if column[0] != name]
    return shown


def _fits_beside(line: str, others: Sequence[str], host: str, width: int | None) -> bool:
    needed = sum(2 + _other_width(other) + len(host) for other in others)
    return width is None or len(line) + needed <= width


def _below(
    shown: Sequence[tuple[str, str, int]], name: str, time: str, ratio: str, host: str
) -> str:
    """Format a peer's line below a row: its time is below fastdist's."""
    names = [name for name, *_ in shown]
    widths = [width for *_, width in shown]
    p50 = names.index("p50")
    return name.rjust(sum(widths[:p50])) + time.rjust(widths[p50]) + ratio.rjust(widths[p50]) + host


def _cells(row: Row, measured: Measurement) -> dict[str, str]:
    """Format the times, bandwidths, wrong elements and share of the floor, by column."""
    moves = row.case.bytes > 0
    return {
        "p50": _time(measured.p50_us),
        "p99": _time(measured.p99_us),
        "algbw": f"{measured.algbw:.2f}" if moves else "-",
        "busbw": f"{measured.busbw:.2f}" if moves else "-",
        "wrong": "-" if measured.wrong is None else str(measured.wrong),
        "floor": f"{100 * row.floor_us / measured.p50_us:.0f}" if row.has_floor else "-",
        "host": _time(measured.host_us),
        "graph": _time(measured.graph_us),
    }


def list_lines(row: Row, width: int | None = None) -> list[str]:
    """Format a table of the ways to reduce one list, one line per way."""
    ours = row.ours
    columns = (*_LIST_COLUMNS, *(() if ours.host_us is None else _GPU_COLUMNS))
    room = None if width is None else width - _WAY_WIDTH - _LIST_RATIO_WIDTH
    shown = _shown(columns, _LIST_SPARE, room)
    names = "".join(f"{name} {unit}".strip().rjust(size) for name, unit, size in shown)
    lines = ["# engine and way".ljust(_WAY_WIDTH) + names + "ratio".rjust(_LIST_RATIO_WIDTH)]
    for way in (ours, *row.others):
        if way.unsupported:
            lines.append(way.engine.ljust(_WAY_WIDTH) + "n/a".rjust(11))
            continue
        cells = _cells(row, way)
        ratio = row.times_as_fast(way)
        line = way.engine.ljust(_WAY_WIDTH)
        line += "".join(cells[name].rjust(size) for name, _, size in shown)
        times = f"{_three_digits(ratio)}x" if ratio and way is not ours else ""
        lines.append((line + times.rjust(_LIST_RATIO_WIDTH)).rstrip())
    return lines


def row_notes(row: Row) -> Iterator[str]:
    """Yield reasons for missing figures, and engines with wrong results."""
    for measured in (row.ours, *row.others):
        if measured.no_graph:
            yield f"# {measured.engine}: {measured.no_graph}"
    for other in row.others:
        if other.unsupported:
            yield f"# {other.engine}: {other.unsupported}"
        if other.wrong:
            yield f"# {row.case.label}: {other.engine} got {other.wrong} elements wrong"


def footing(report: Report) -> list[str]:
    """Return the lines below the table: floor, units, warnings."""
    lines = ["#", *_floor_lines(report)]
    if any(row.others for row in report.rows):
        lines.append("# ratio: the peer's time divided by fastdist's")
    if report.placement is not None:
        lines.append("# p50, p99: work on the GPU, between events; host: time until a call returns")
        lines.append("# graph: replay of a CUDA graph with the call; -: no graph")
    if report.wrong:
        lines.append(f"# WRONG RESULTS: {report.wrong} elements")
    lines += [f"# warning: {warning}" for warning in report.call_warnings]
    return lines


def _floor_lines(report: Report) -> list[str]:
    copies = (
        f"# {report.ranks} ranks copying at once move {report.copy_gb_per_s:.1f} GB/s (read and "
        "written)"
    )
    placement = report.placement
    if placement is None:
        lines = [f"{copies}; floor: % of the speed at this bandwidth"]
        if any(row.fits_caches for row in report.rows):
            lines.append("# floor -: the caches hold the buffers of all ranks")
        return lines
    if placement.is_shared:
        return [
            f"# {placement.sharing}: not comparable with one rank per GPU",
            f"{copies}; floor: % of the speed at this bandwidth",
        ]
    if not placement.link_gb_per_s:
        return [copies, "# floor -: the links between the GPUs are unknown"]
    return [
        copies,
        f"# each GPU sends {placement.link_gb_per_s:.0f} GB/s over {placement.link}; floor: busbw "
        "as % of that",
    ]


def _other_width(name: str) -> int:
    return max(_PEER_WIDTH + _RATIO_WIDTH, len(name))


def _time(us: float | None) -> str:
    if us is None:
        return "-"
    return f"{us:.2f}" if us < 1000 else f"{us:.1f}" if us < 1e5 else f"{us:.0f}"


def _three_digits(ratio: float) -> str:
    return f"{ratio:.2f}" if ratio < 10 else f"{ratio:.1f}" if ratio < 100 else f"{ratio:.0f}"


def _figures(measured: Measurement) -> dict[str, Any]:
    figures: dict[str, Any] = {
        "p50_us": round(measured.p50_us, 3),
        "p99_us": round(measured.p99_us, 3),
        "algbw_gb_per_s": round(measured.algbw, 4),
        "busbw_gb_per_s": round(measured.busbw, 4),
        "iterations": measured.iterations,
        "wrong": measured.wrong,
    }
    if measured.samples_us:
        figures["samples_us"] = [round(us, 3) for us in measured.samples_us]
    if measured.host_us is not None:
        for name in ("host_us", "host_p99_us", "graph_us"):
            us = getattr(measured, name)
            figures[name] = None if us is None else round(us, 3)
    return figures


def row_object(row: Row) -> dict[str, Any]:
    """Convert a row for JSON."""
    peers: dict[str, Any] = {}
    for other in row.others:
        ratio = row.times_as_fast(other)
        if ratio is None:
            peers[other.engine] = {"unsupported": other.unsupported}
        else:
            peers[other.engine] = {**_figures(other), "times_as_fast": round(ratio, 3)}
            if host_ratio := row.host_times_as_fast(other):
                peers[other.engine]["host_times_as_fast"] = round(host_ratio, 3)
    return {
        **asdict(row.case),
        **_figures(row.ours),
        "floor_us": round(row.floor_us, 3),
        "floor_percent": round(row.floor_percent, 1) if row.has_floor else None,
        "peers": peers,
    }


def report_object(report: Report) -> dict[str, Any]:
    """Convert a report for JSON; `peers` has every peer and every other way to reduce a list."""
    placement = report.placement
    on_gpus = {}
    if placement is not None:
        on_gpus["gpus"] = {**asdict(placement), "shared": placement.sharing}
    return {
        "ranks": report.ranks,
        **on_gpus,
        "machine": report.machine,
        "engines": report.engines,
        "missing": report.missing,
        "failed": report.failed,
        "busy_cores": round(report.busy_cores, 2),
        "warnings": report.busy_warnings + report.call_warnings,
        "copy_gb_per_s": round(report.copy_gb_per_s, 2),
        "rows": [row_object(row) for row in report.rows],
    }


def to_json(report: Report) -> str:
    """Format `report_object`."""
    return json.dumps(report_object(report), indent=2) + "\n"
