"""Formats a report as a table, line by line, as an object for JSON, and as a page."""

from __future__ import annotations

import importlib.resources
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from typing import Any

from fastdist._version import __version__
from fastdist.cli.bench.cases import Case
from fastdist.cli.bench.plot import to_svg
from fastdist.cli.bench.results import UNSTABLE_WIDTH, Measurement, Report, Row, digits, format_time
from fastdist.cli.sizes import format_size

Column = tuple[int, str, Callable[..., object]]  # width, unit, and cell of a row

_COLUMNS: dict[str, Column] = {
    "bytes": (11, "", lambda row: row.case.bytes),
    "count": (11, "", lambda row: row.case.count),
    "type": (9, "", lambda row: row.case.dtype),
    "redop": (6, "", lambda row: row.case.redop or "none"),
    "p50": (10, "us", lambda row: _time(row.ours.p50_us)),
    "p99": (10, "us", lambda row: _time(row.ours.p99_us)),
    "algbw": (7, "GB/s", lambda row: _speed(row.algbw(row.ours.p50_us))),
    "busbw": (7, "GB/s", lambda row: _speed(row.busbw(row.ours.p50_us))),
    "wrong": (6, "", lambda row: row.ours.wrong),
    "floor": (6, "%", lambda row: f"{row.floor_percent:.0f}" if row.has_floor else "-"),
    "host": (9, "us", lambda row: _time(row.ours.host_us)),
    "graph": (10, "us", lambda row: _time(row.ours.graph_us)),
}
# Of a row and one of its peers.
_PEER_COLUMNS: dict[str, Column] = {
    "us": (12, "", lambda _, other: "n/a" if other.unsupported else _time(other.p50_us)),
    "ratio": (7, "", lambda row, other: _times_as_fast(row, other)),
    "host": (9, "", lambda _, other: _time(other.host_us)),
}
_ONLY_ON_GPUS = ("host", "graph")
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
        self._ours, self._peer = (
            {name: each[name] for name in each if on_gpu or name not in _ONLY_ON_GPUS}
            for each in (_COLUMNS, _PEER_COLUMNS)
        )
        for name in _SPARE:
            if width is not None and len(_line(self._ours, self._ours)) > width:
                del self._ours[name]
        ours, peer = (_line(each, each) for each in (self._ours, self._peer))
        self._is_beside = not peers or width is None or len(ours + len(peers) * peer) <= width
        if not self._is_beside:  # a peer's time is below fastdist's
            before = ours.index("p50") + len("p50") - _PEER_COLUMNS["us"][0]
            self._peer = {"peer": (before, "", lambda _, other: other.engine)} | self._peer
        self._noted: set[str] = set()

    def header(self) -> list[str]:
        """Return the lines of column names and units."""
        names, heads = (_line(each, each) for each in (self._ours, self._peer))
        units = _line(self._ours, (unit for _, unit, _ in self._ours.values()))
        if not self._is_beside:
            return [names, units, heads]
        us = _PEER_COLUMNS["us"][0]
        above = "".join(name.rjust(us).ljust(len(heads)) for name in self._peers)
        return [f"{names}{above}".rstrip(), units + len(self._peers) * heads]

    def row(self, row: Row) -> list[str]:
        """Format a row: one line, or one more for each peer; then notes of it.

        Notes are reasons for missing figures, each once in a table, and peers' wrong results.
        """
        lines = [_line(self._ours, (cell(row) for _, _, cell in self._ours.values()))]
        for other in row.others:
            cells = (cell(row, other) for _, _, cell in self._peer.values())
            lines.append(_line(self._peer, cells))
        if self._is_beside:
            lines = ["".join(lines)]
        for measured in row.measurements:
            note = f"# {measured.engine}: {measured.no_graph or measured.unsupported}"
            if not note.endswith(": ") and note not in self._noted:
                lines.append(note)
                self._noted.add(note)
            if measured.wrong and measured is not row.ours:
                lines.append(f"# {measured.engine}: {measured.wrong} elements wrong")
        return [line.rstrip() for line in lines]


def _line(columns: Mapping[str, Column], cells: Iterable[object]) -> str:
    widths = (width for width, _, _ in columns.values())
    return "".join(str(cell).rjust(width) for cell, width in zip(cells, widths, strict=True))


def _speed(gb_per_s: float) -> str:
    return f"{gb_per_s:.2f}" if gb_per_s else "-"


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


def footing(report: Report) -> list[str]:
    """Return the lines below the table: floor, units, warnings."""
    on_gpu, sharing = report.placement is not None, report.placement and report.placement.sharing
    is_apart, fits_caches = on_gpu and not sharing, any(row.fits_caches for row in report.rows)
    moved = f"{report.copy_gb_per_s:.1f} GB/s (read and written)"
    copies = f"{report.ranks} ranks copying at once move {moved}"
    notes = [
        (sharing, f"{sharing}: not comparable with one rank per GPU"),
        (not is_apart, f"{copies}; floor: % of the speed at this bandwidth"),
        (is_apart, copies),
        (is_apart, "floor -: each rank has a GPU of its own"),
        (fits_caches, "floor -: the caches hold the buffers of all ranks"),
        (any(row.others for row in report.rows), "ratio: the peer's time divided by fastdist's"),
        (on_gpu, "p50, p99: work on the GPU, between events; host: time until a call returns"),
        (on_gpu, "graph: replay of a CUDA graph with the call; -: no graph"),
        *((True, f"warning: {warning}") for warning in report.warnings),
    ]
    return ["#", *(f"# {line}" for applies, line in notes if applies)]


def _figures(row: Row, measured: Measurement) -> dict[str, Any]:
    if measured.unsupported:
        return {"unsupported": measured.unsupported}
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
    for name, of in (("times_as_fast", "p50_us"), ("host_times_as_fast", "host_us")):
        if measured is not row.ours and (ratio := row.times_as_fast(measured, of)):
            figures[name] = round(ratio, 3)
    return figures


def row_object(row: Row) -> dict[str, Any]:
    """Convert a row for JSON."""
    return {
        **asdict(row.case),
        **_figures(row, row.ours),
        "floor_us": round(row.floor_us, 3),
        "floor_percent": round(row.floor_percent, 1) if row.has_floor else None,
        "peers": {other.engine: _figures(row, other) for other in row.others},
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


def recorded_object(report: Report, took_s: float) -> dict[str, Any]:
    """Convert a report for its JSON file; every row has the command that measures it once more."""
    recorded = report_object(report)
    for row, found in zip(report.rows, recorded["rows"], strict=True):
        found["command"] = _command(report, row.case)
    return {
        "fastdist": __version__,
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "took_s": round(took_s),
        **recorded,
    }


def _command(report: Report, case: Case) -> str:
    what = f" --list {case.model}" if case.model else f" --sizes {format_size(case.bytes)}"
    if case.collective == "barrier":
        what = ""
    _, *peers = report.engines
    versus = f" --vs {','.join(peers)}" if peers else ""
    return f"fastdist bench {case.collective}{what} --ranks {report.ranks}{versus}"


def page(report: Report, recorded: dict[str, Any]) -> str:
    """Return the page of a report: one HTML file with its charts and data, which loads nothing.

    `recorded` is the same as JSON.
    """
    from jinja2 import Environment, StrictUndefined

    template = importlib.resources.files(__package__).joinpath("page.html")
    environment = Environment(autoescape=True, trim_blocks=True, undefined=StrictUndefined)
    environment.policies["json.dumps_kwargs"] = {"sort_keys": False}
    environment.filters |= {"time": format_time, "digits": digits}
    all_reduces = [row for row in report.rows if row.case.collective == "all_reduce"]
    of_one_array = [row for row in all_reduces if not row.case.model]
    return environment.from_string(template.read_text(encoding="utf-8")).render(
        report=report,
        recorded=recorded,
        rows=list(zip(report.rows, recorded["rows"], strict=True)),
        curves=to_svg(replace(report, rows=of_one_array)),
        unstable_width=UNSTABLE_WIDTH,
    )
