"""Formats a report as a table, line by line, and as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any, TextIO

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
_GPU_COLUMNS = (("host", 9), ("graph", 10))
_LIST_COLUMNS = (
    *(("p50 us", 11), ("p99 us", 11), ("algbw", 8), ("busbw", 8), ("wrong", 7), ("floor %", 9)),
)
_PEER_WIDTH = 10
_RATIO_WIDTH = 7
_WAY_WIDTH = 26


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


def column_lines(others: Sequence[str], on_gpu: bool = False) -> list[str]:
    """Return the two lines of column names and units; peers are on the right."""
    names = "".join(name.rjust(width) for name, _, width in _COLUMNS)
    units = "".join(unit.rjust(width) for _, unit, width in _COLUMNS)
    host = ""
    if on_gpu:
        names += "".join(name.rjust(width) for name, width in _GPU_COLUMNS)
        units += "".join("us".rjust(width) for _, width in _GPU_COLUMNS)
        host = "host".rjust(_GPU_COLUMNS[0][1])
    for other in others:
        width = _other_width(other)
        names += "  " + other.center(width + len(host))
        units += "  " + "us".rjust(width - _RATIO_WIDTH) + "ratio".rjust(_RATIO_WIDTH) + host
    return [names.rstrip(), units.rstrip()]


def row_line(row: Row) -> str:
    """Format one line of the table."""
    case, ours = row.case, row.ours
    names = (str(case.bytes), str(case.count), case.dtype, case.redop or "none")
    cells = (*names, *_cells(row, ours))
    line = "".join(cell.rjust(width) for cell, (*_, width) in zip(cells, _COLUMNS, strict=True))
    line += _gpu_cells(ours)
    for other in row.others:
        ratio = row.times_as_fast(other)
        time = _time(other.p50_us) if ratio else "n/a"
        width = _other_width(other.engine)
        line += "  " + time.rjust(width - _RATIO_WIDTH)
        line += (f"{_three_digits(ratio)}x" if ratio else "").rjust(_RATIO_WIDTH)
        if ours.host_us is not None:
            line += _time(other.host_us).rjust(_GPU_COLUMNS[0][1])
    return line.rstrip()


def _cells(row: Row, measured: Measurement) -> tuple[str, ...]:
    """Format the times, bandwidths, wrong elements and share of the floor."""
    moves = row.case.bytes > 0
    return (
        _time(measured.p50_us),
        _time(measured.p99_us),
        f"{measured.algbw:.2f}" if moves else "-",
        f"{measured.busbw:.2f}" if moves else "-",
        "-" if measured.wrong is None else str(measured.wrong),
        f"{100 * row.floor_us / measured.p50_us:.0f}" if row.has_floor else "-",
    )


def _gpu_cells(measured: Measurement) -> str:
    """Format the times of the host and of a graph; empty on CPUs."""
    if measured.host_us is None:
        return ""
    times = (measured.host_us, measured.graph_us)
    columns = zip(times, _GPU_COLUMNS, strict=True)
    return "".join(_time(us).rjust(width) for us, (_, width) in columns)


def list_lines(row: Row) -> list[str]:
    """Format a table of the ways to reduce one list, one line per way."""
    ours = row.ours
    names = "# engine and way".ljust(_WAY_WIDTH)
    names += "".join(name.rjust(width) for name, width in _LIST_COLUMNS)
    if ours.host_us is not None:
        names += "".join(f"{name} us".rjust(width) for name, width in _GPU_COLUMNS)
    lines = [names + "ratio".rjust(9)]
    for way in (ours, *row.others):
        if way.unsupported:
            lines.append(way.engine.ljust(_WAY_WIDTH) + "n/a".rjust(11))
            continue
        cells = zip(_cells(row, way), _LIST_COLUMNS, strict=True)
        line = way.engine.ljust(_WAY_WIDTH)
        line += "".join(cell.rjust(width) for cell, (_, width) in cells)
        ratio = row.times_as_fast(way)
        line += _gpu_cells(way)
        line += (f"{_three_digits(ratio)}x" if ratio and way is not ours else "").rjust(9)
        lines.append(line.rstrip())
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


def write_json(report: Report, file: TextIO) -> None:
    """Write `report_object`."""
    json.dump(report_object(report), file, indent=2)
    file.write("\n")
