"""The page of a report: one HTML file with its charts and its data, which loads nothing else."""

from __future__ import annotations

import importlib.resources
import json
from collections.abc import Iterable
from dataclasses import replace
from html import escape
from string import Template
from typing import Any

from fastdist.cli.bench import summary
from fastdist.cli.bench.comparison import Comparison
from fastdist.cli.bench.intervals import UNSTABLE_WIDTH, median_interval
from fastdist.cli.bench.peers import peer_of
from fastdist.cli.bench.plot import bars_svg, curves_svg, legend_svgs
from fastdist.cli.bench.results import Measurement, Report, Row


def page(report: Report, recorded: dict[str, Any], change: Comparison | None) -> str:
    """Return the page of a report, which holds the same as JSON, `recorded`.

    `change` is the comparison with the last run, if there is one.
    """
    when = recorded["when"][:16].replace("T", " ")
    commands = (row["command"] for row in recorded["rows"])
    rows = list(zip(report.rows, commands, strict=True))
    arrays = [(row, command) for row, command in rows if not row.case.model]
    lists = [(row, command) for row, command in rows if row.case.model]
    curves = [row for row, _ in arrays if row.case.collective == "all_reduce"]
    all_reduces = replace(report, rows=curves)
    template = importlib.resources.files(__package__).joinpath("page.html")
    return Template(template.read_text(encoding="utf-8")).substitute(
        title=f"fastdist {escape(recorded['fastdist'])} next to its peers",
        machine=escape(f"{when} UTC, {report.ranks} ranks; {report.machine_text}"),
        cautions=_items(_cautions(report), "caution"),
        sentences=_items(summary.peer_sentences(report)),
        change=_change(change),
        legend="".join(
            f"<span>{line}{escape(name)}</span>" for line, name in legend_svgs(all_reduces)
        ),
        curves=curves_svg(all_reduces) if curves else "",
        lists="".join(_list(report, row, command) for row, command in lists),
        passes=len(report.rows[0].ours.samples_us),
        arrays=_arrays(report, arrays),
        unstable=f"{100 * UNSTABLE_WIDTH:.0f} %",
        copies=f"{report.copy_gb_per_s:.1f} GB/s",
        settings=_items(
            f"{name}: {' '.join(f'{key}={value}' for key, value in settings.items())}"
            for name, settings in recorded["settings"].items()
        ),
        missing=_items(f"{name} is not installed: {how}" for name, how in report.missing.items()),
        data=json.dumps(recorded).replace("</", "<\\/"),  # no end of the script element
    )


def _cautions(report: Report) -> list[str]:
    cautions = [f"{name} failed and is left out: {why}" for name, why in report.failed.items()]
    cautions += [
        f"{row.case.title}: {measured.engine} got wrong results"
        for row in report.rows
        for measured in row.measurements
        if measured.wrong
    ]
    if unstable := summary.unstable_titles(report):
        cautions.append(
            f"{len(unstable)} of {len(report.rows)} cases are unstable: {', '.join(unstable)}"
        )
    return cautions + report.busy_warnings + report.call_warnings


def _change(change: Comparison | None) -> str:
    if change is None:
        return ""
    old = change.old
    found = [str(c) for c in change.changes if c.is_slower or c.is_faster]
    return (
        f"<h2>Since the last run on this machine</h2>\n<p class='muted'>{escape(old.version)}, "
        f"{escape(old.when)}</p>\n{_items(found or ['No case changed.'])}\n"
        "<details><summary>All cases, and what to keep "
        f"in mind</summary>{_items([*map(str, change.changes), *change.notes()])}</details>"
    )


def _list(report: Report, row: Row, command: str) -> str:
    body = [[escape(way.engine), *_times(way), _ratio(row, way)] for way in row.measurements]
    return (
        f"<h2>{escape(row.case.title)}</h2>\n<div class='charts'>"
        f"{bars_svg(replace(report, rows=[row]))}<div class='wide'>"
        f"{_table(('way', 'time', 'p99', 'ratio'), body)}</div></div>\n"
        f"{_opens('the command', command)}"
    )


def _arrays(report: Report, rows: Iterable[tuple[Row, str]]) -> str:
    _, *others = report.engines
    body = []
    for row, command in rows:
        floor = f"{row.floor_percent:.0f} %" if row.has_floor else "–"
        ratios = [_ratio(row, other) for other in row.others]
        body.append([_opens(row.case.title, command), *_times(row.ours), floor, *ratios])
    return _table(("case", "fastdist", "p99", "floor", *others), body)


def _times(measured: Measurement) -> tuple[str, str]:
    """Return the cells of an engine's time and of its 99th percentile."""
    if measured.unsupported:
        return "n/a", ""
    time = median_interval(measured.samples_us)
    flag = "<small class='caution'>unstable</small>" if time.is_unstable else ""
    p50, low, high = map(summary.format_time, (time.estimate, time.low, time.high))
    return f"{p50}<small>{low} to {high}</small>{flag}", summary.format_time(measured.p99_us)


def _ratio(row: Row, other: Measurement) -> str:
    if other.unsupported:
        return f"<span class='open' title='{escape(other.unsupported)}'>n/a</span>"
    if other is row.ours:
        return "1"
    ratio = summary.ratio_of(row, other)
    kind = "good" if ratio.low > 1 else "slow" if ratio.high < 1 else "open"
    if peer_of(other.engine) == "fastdist":  # another way to reduce a list
        kind = ""
    ends = f"{summary.digits(ratio.low)} to {summary.digits(ratio.high)}"
    return f"<span class='{kind}'>{summary.digits(ratio.estimate)}</span><small>{ends}</small>"


def _table(heads: Iterable[str], body: Iterable[Iterable[str]]) -> str:
    names = "".join(f"<th>{escape(head)}</th>" for head in heads)
    lines = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>\n" for row in body)
    return f"<table><thead><tr>{names}</tr></thead><tbody>{lines}</tbody></table>"


def _opens(title: str, command: str) -> str:
    return f"<details><summary>{escape(title)}</summary><code>{escape(command)}</code></details>"


def _items(lines: Iterable[str], kind: str = "") -> str:
    items = "".join(f"<li>{escape(line)}</li>\n" for line in lines)
    return f"<ul class='{kind}'>{items}</ul>" if items else ""
