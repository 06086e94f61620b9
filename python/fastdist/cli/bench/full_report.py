"""Runs `fastdist bench report`: every collective next to every installed peer, as a page and JSON.

Every case is measured in several passes. A pass starts all engines anew, and the samples of a
figure are the passes' medians (results.py). They cover what differs from start to start, such as
where arrays lie, and what else the machine does over minutes.
"""

from __future__ import annotations

import argparse
import importlib.resources
import importlib.util
import json
import statistics
import sys
import time
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from fastdist._version import __version__
from fastdist.cli.bench import results
from fastdist.cli.bench.cases import COLLECTIVES, Case, array_cases, list_case
from fastdist.cli.bench.command import Plan, Progress, run_planned
from fastdist.cli.bench.peers import PEER_NAMES, cache_dir, fastdist_engine, find_peers
from fastdist.cli.bench.plot import to_svg
from fastdist.cli.bench.report import report_object
from fastdist.cli.bench.results import Report, Row, combined, peer_sentences
from fastdist.cli.bench.session import Effort, EngineError, Session
from fastdist.cli.command import check_plot
from fastdist.cli.machine_facts import machine_facts, usable_cores
from fastdist.cli.sizes import format_size, parse_sizes
from fastdist.processes.terminal import fitted, show

PASSES = results.SAMPLES

_ALL_REDUCE_SIZES = parse_sizes("8,1K,64K,1M,16M,64M")
_OTHER_SIZES = parse_sizes("1K,1M")
_EFFORT = Effort(time_s=0.1, warmup=1, rounds=1, timeout_s=60.0)


def run_report(options: argparse.Namespace) -> int:
    """Measure and write the page and the JSON; return an exit code as `run_planned` does."""
    return run_planned(options, _plan, _run)


def report_cases(ranks: int) -> tuple[Case, ...]:
    """Return what a report measures, in its order."""
    cases = [
        *array_cases("all_reduce", _ALL_REDUCE_SIZES, ranks),
        list_case("resnet50", "float32", "sum", "numpy"),
    ]
    for name in COLLECTIVES:
        if name != "all_reduce":
            cases += array_cases(name, _OTHER_SIZES, ranks)
    return tuple(cases)


def _plan(options: argparse.Namespace) -> Plan:
    """Return what to measure; set the path of the page."""
    ranks = options.ranks or max(2, usable_cores())
    out = options.out or cache_dir("reports") / f"{datetime.now(UTC):%Y-%m-%d-%H%M}.html"
    if out.suffix != ".html":
        raise ValueError(f"expected --out with the suffix .html, got {out}")
    check_plot(out.with_suffix(".svg"))
    if importlib.util.find_spec("jinja2") is None:
        raise ImportError("a report's page needs jinja2: pip install jinja2")
    out.parent.mkdir(parents=True, exist_ok=True)
    options.out = out
    peers, missing = find_peers(PEER_NAMES, ranks)
    report = Report(ranks, machine_facts(), {}, missing)
    return Plan(report, report_cases(ranks), _EFFORT, [fastdist_engine(ranks), *peers])


def _run(options: argparse.Namespace, plan: Plan) -> Report:
    began = time.monotonic()
    with Progress(sys.stderr, PASSES * len(plan.cases)) as progress:
        report = measure(plan, PASSES, progress)
    recorded = recorded_object(report, time.monotonic() - began)
    json_path = options.out.with_suffix(".json")
    text = json.dumps(recorded, indent=1) + "\n"
    json_path.write_text(text)
    options.out.write_text(page(report, recorded), encoding="utf-8")
    lines = list(peer_sentences(report))
    lines += [f"{name} is not installed: {how}" for name, how in report.missing.items()]
    lines += [*report.cautions, f"wrote {options.out} and {json_path}", ""]
    file = sys.stderr if options.json else sys.stdout
    show(fitted("\n".join(lines), file), file)
    if options.json:
        show(text)
    return report


def measure(plan: Plan, passes: int, progress: Progress) -> Report:
    """Measure every case on every engine, `passes` times.

    A peer that fails is left out, and the pass in which it failed is repeated.
    """
    report, left = plan.report, plan.engines
    copies: list[float] = []
    done: list[list[Row]] = []
    began = time.monotonic()
    while len(done) < passes:
        progress.line(f"pass {len(done) + 1} of {passes}{_time_left(began, len(done), passes)}")
        try:
            with Session(left, report.ranks, plan.effort) as session:
                failures = session.failures
                rows = []
                for case in plan.cases:
                    progress.update(case.title)
                    rows.append(session.measure(case))
                    progress.update(case.title, 1)
                report.engines, copy = session.versions, session.copy_gb_per_s
        except EngineError as failure:
            if failure.engine == left[0].name:
                raise
            failures = [failure]
        else:
            done.append(rows)
            copies.append(copy)
        for error in failures:
            progress.line(f"fastdist bench: {error}")
            report.failed[error.engine] = error.reason
            left = [engine for engine in left if engine.name != error.engine]
    report.copy_gb_per_s = statistics.median(copies)
    report.rows = [combined(rows) for rows in zip(*done, strict=True)]
    return report


def _time_left(began: float, done: int, passes: int) -> str:
    if not done:
        return ""
    left_s = (time.monotonic() - began) / done * (passes - done)
    return f", about {left_s / 60:.0f} min left" if left_s > 90 else f", about {left_s:.0f} s left"


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
    words = ["fastdist bench", case.collective]
    if case.model:
        words.append(f"--list {case.model}")
    elif case.collective != "barrier":
        words.append(f"--sizes {format_size(case.bytes)}")
    words.append(f"--ranks {report.ranks}")
    _, *peers = report.engines
    if peers:
        words.append(f"--vs {','.join(peers)}")
    return " ".join(words)


def page(report: Report, recorded: dict[str, Any]) -> str:
    """Return the page of a report: one HTML file with its charts and data, which loads nothing.

    `recorded` is the same as JSON.
    """
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, trim_blocks=True, undefined=StrictUndefined)
    environment.filters |= {"time": results.format_time, "digits": results.digits}
    rows = list(zip(report.rows, (row["command"] for row in recorded["rows"]), strict=True))
    curves = [row for row, _ in rows if row.case.collective == "all_reduce" and not row.case.model]
    template = importlib.resources.files(__package__).joinpath("page.html")
    return environment.from_string(template.read_text(encoding="utf-8")).render(
        report=report,
        recorded=recorded,
        rows=rows,
        sentences=list(peer_sentences(report)),
        curves=to_svg(replace(report, rows=curves)),
        data=json.dumps(recorded).replace("</", "<\\/"),  # no end of the script element
        unstable_width=results.UNSTABLE_WIDTH,
    )
