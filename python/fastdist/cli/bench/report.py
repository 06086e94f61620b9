"""Formats a report as a table, line by line, and as an object for JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from fastdist.cli.bench.results import Measurement, Report, Row

Columns = dict[str, int]  # width by name
Cells = dict[str, str]

_COLUMNS: Columns = {"bytes": 11, "count": 11, "type": 9, "redop": 6, "p50": 10, "p99": 10}
_COLUMNS |= {"algbw": 7, "busbw": 7, "wrong": 6, "floor": 6}
_GPU_COLUMNS: Columns = {"host": 9, "graph": 10}  # additional columns on GPUs
_PEER_COLUMNS: Columns = {"us": 12, "ratio": 7}
_UNITS = dict.fromkeys(("p50", "p99", "host", "graph"), "us")
_UNITS |= {"algbw": "GB/s", "busbw": "GB/s", "floor": "%"}
# Columns that a narrow terminal does not show, in the order in which they are left out.
_SPARE = ("count", "redop", "type")


def heading(report: Report, title: str) -> list[str]:
    """Return the lines above the table: machine, engines."""
    lines = [
        f"# fastdist bench {title}, {report.ranks} ranks",
        f"# {report.machine_text}",
        f"# {', '.join(report.engines.values())}",
    ]
    if report.placement is not None:
        lines.insert(2, f"# {report.placement}; CUDA {report.machine['cuda driver']}")
    lines += [f"# {name} is not installed: {install}" for name, install in report.missing.items()]
    lines += [f"# {name} failed to start: {reason}" for name, reason in report.failed.items()]
    return [*lines, "#"]


class Table:
    """The lines of a table, with the columns of its peers on the right, or below in a narrow one.

    A narrow table leaves columns out.
    """

    def __init__(
        self, peers: Sequence[str], on_gpu: bool = False, width: int | None = None
    ) -> None:
        """Choose the columns that fit in `width`; None: a line may have any length."""
        self._peers = peers
        self._shown = _COLUMNS | (_GPU_COLUMNS if on_gpu else {})
        for name in _SPARE:
            if width is not None and sum(self._shown.values()) > width:
                del self._shown[name]
        host = {"host": _GPU_COLUMNS["host"]} if on_gpu else {}
        self._peer = _PEER_COLUMNS | host
        needed = sum(self._shown.values()) + len(peers) * sum(self._peer.values())
        self._is_beside = not peers or width is None or needed <= width
        if not self._is_beside:  # a peer's time is below fastdist's
            before = sum(list(self._shown.values())[: list(self._shown).index("p50")])
            p50 = self._shown["p50"]
            self._peer = {"peer": before, "us": p50, "ratio": p50, **host}

    def header(self) -> list[str]:
        """Return the lines of column names and units."""
        names = {name: name for name in self._shown | self._peer}
        if not self._is_beside:
            return [*self._lines(names, []), *self._lines(_UNITS, [names])]
        peers = self._lines(names, [{"us": name} for name in self._peers])
        return [*peers, *self._lines(_UNITS, [names] * len(self._peers))]

    def row(self, row: Row) -> list[str]:
        """Format a row: one line, or one more for each peer."""
        peers = [
            {
                "peer": other.engine,
                "us": "n/a" if other.unsupported else _time(other.p50_us),
                "ratio": _times_as_fast(row, other),
                "host": _time(other.host_us),
            }
            for other in row.others
        ]
        return self._lines(_cells(row), peers)

    def _lines(self, cells: Cells, peers: Sequence[Cells]) -> list[str]:
        lines = [_aligned(self._shown, cells), *(_aligned(self._peer, each) for each in peers)]
        return [line.rstrip() for line in (["".join(lines)] if self._is_beside else lines)]


def _aligned(columns: Columns, cells: Cells) -> str:
    return "".join(cells.get(name, "").rjust(width) for name, width in columns.items())


def _cells(row: Row) -> dict[str, str]:
    case, ours = row.case, row.ours
    moves = case.bytes > 0
    return {
        "bytes": str(case.bytes),
        "count": str(case.count),
        "type": case.dtype,
        "redop": case.redop or "none",
        "p50": _time(ours.p50_us),
        "p99": _time(ours.p99_us),
        "algbw": f"{row.algbw(ours.p50_us):.2f}" if moves else "-",
        "busbw": f"{row.busbw(ours.p50_us):.2f}" if moves else "-",
        "wrong": str(ours.wrong),
        "floor": f"{row.floor_percent:.0f}" if row.has_floor else "-",
        "host": _time(ours.host_us),
        "graph": _time(ours.graph_us),
    }


def _time(us: float | None) -> str:
    if us is None:
        return "-"
    return f"{us:.2f}" if us < 1000 else f"{us:.1f}" if us < 1e5 else f"{us:.0f}"


def _times_as_fast(row: Row, other: Measurement) -> str:
    """Format a ratio with three digits: `1.39x`; empty without figures."""
    ratio = row.times_as_fast(other)
    if ratio is None:
        return ""
    return f"{ratio:.2f}x" if ratio < 10 else f"{ratio:.1f}x" if ratio < 100 else f"{ratio:.0f}x"


def row_notes(row: Row) -> Iterator[str]:
    """Yield reasons for missing figures, and engines with wrong results."""
    for measured in row.measurements:
        if reason := measured.no_graph or measured.unsupported:
            yield f"# {measured.engine}: {reason}"
        if measured.wrong and measured is not row.ours:
            yield f"# {row.case.label}: {measured.engine} got {measured.wrong} elements wrong"


def footing(report: Report) -> list[str]:
    """Return the lines below the table: floor, units, warnings."""
    placement = report.placement
    moved = f"{report.copy_gb_per_s:.1f} GB/s (read and written)"
    copies = f"# {report.ranks} ranks copying at once move {moved}"
    lines = ["#"]
    if placement is not None and not placement.is_shared:
        lines += [copies, "# floor -: each rank has a GPU of its own"]
    else:
        if placement is not None:
            lines.append(f"# {placement.sharing}: not comparable with one rank per GPU")
        lines.append(f"{copies}; floor: % of the speed at this bandwidth")
    if any(row.fits_caches for row in report.rows):
        lines.append("# floor -: the caches hold the buffers of all ranks")
    if any(row.others for row in report.rows):
        lines.append("# ratio: the peer's time divided by fastdist's")
    if placement is not None:
        lines.append("# p50, p99: work on the GPU, between events; host: time until a call returns")
        lines.append("# graph: replay of a CUDA graph with the call; -: no graph")
    if report.wrong:
        lines.append(f"# WRONG RESULTS: {report.wrong} elements")
    return lines + [f"# warning: {warning}" for warning in report.warnings]


def _figures(row: Row, measured: Measurement) -> dict[str, Any]:
    figures: dict[str, Any] = {
        "p50_us": round(measured.p50_us, 3),
        "p99_us": round(measured.p99_us, 3),
        "algbw_gb_per_s": round(row.algbw(measured.p50_us), 4),
        "busbw_gb_per_s": round(row.busbw(measured.p50_us), 4),
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


def _peer_figures(row: Row, other: Measurement) -> dict[str, Any]:
    if other.unsupported:
        return {"unsupported": other.unsupported}
    figures = _figures(row, other)
    for name, of in (("times_as_fast", "p50_us"), ("host_times_as_fast", "host_us")):
        if ratio := row.times_as_fast(other, of):
            figures[name] = round(ratio, 3)
    return figures


def row_object(row: Row) -> dict[str, Any]:
    """Convert a row for JSON."""
    return {
        **asdict(row.case),
        **_figures(row, row.ours),
        "floor_us": round(row.floor_us, 3),
        "floor_percent": round(row.floor_percent, 1) if row.has_floor else None,
        "peers": {other.engine: _peer_figures(row, other) for other in row.others},
    }


def report_object(report: Report) -> dict[str, Any]:
    """Convert a report for JSON."""
    placement = report.placement
    gpus = {} if placement is None else {**asdict(placement), "shared": placement.sharing}
    return {
        "ranks": report.ranks,
        **({"gpus": gpus} if gpus else {}),
        "machine": report.machine,
        "engines": report.engines,
        "missing": report.missing,
        "failed": report.failed,
        "warnings": report.warnings,
        "copy_gb_per_s": round(report.copy_gb_per_s, 2),
        "rows": [row_object(row) for row in report.rows],
    }
