"""The page of a report: one HTML file with its charts and its data, which loads nothing else."""

from __future__ import annotations

import importlib.resources
import json
from dataclasses import replace
from typing import Any

from fastdist.cli.bench import summary
from fastdist.cli.bench.comparison import Comparison
from fastdist.cli.bench.intervals import UNSTABLE_WIDTH, median_interval
from fastdist.cli.bench.peers import peer_of
from fastdist.cli.bench.plot import bars_svg, curves_svg, legend_svgs
from fastdist.cli.bench.results import Report


def page(report: Report, recorded: dict[str, Any], change: Comparison | None) -> str:
    """Return the page of a report, which holds the same as JSON, `recorded`.

    `change` is the comparison with the last run, if there is one.
    """
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, trim_blocks=True, undefined=StrictUndefined)
    environment.filters |= {"time": summary.format_time, "digits": summary.digits}
    environment.globals |= {
        "median_interval": median_interval,
        "ratio_of": summary.ratio_of,
        "peer_of": peer_of,
        "unstable_width": UNSTABLE_WIDTH,
    }
    rows = list(zip(report.rows, (row["command"] for row in recorded["rows"]), strict=True))
    curves = [row for row, _ in rows if row.case.collective == "all_reduce" and not row.case.model]
    all_reduces = replace(report, rows=curves)
    template = importlib.resources.files(__package__).joinpath("page.html")
    return environment.from_string(template.read_text(encoding="utf-8")).render(
        report=report,
        recorded=recorded,
        change=change,
        rows=rows,
        cautions=_cautions(report),
        sentences=list(summary.peer_sentences(report)),
        legend=legend_svgs(all_reduces),
        curves=curves_svg(all_reduces) if curves else "",
        bars=lambda row: bars_svg(replace(report, rows=[row])),
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
