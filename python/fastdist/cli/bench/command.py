"""Runs `fastdist bench OP`: starts the engines, prints the table, writes the files."""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import TextIO, TypeVar

from fastdist.cli.bench import report as text
from fastdist.cli.bench.engine_ranks import EngineError
from fastdist.cli.bench.machine import busy_cores, gpu_facts, machine_facts
from fastdist.cli.bench.options import Plan, make_plan
from fastdist.cli.bench.plot import write_plot
from fastdist.cli.bench.progress import shown_progress
from fastdist.cli.bench.results import Report
from fastdist.cli.bench.session import Session
from fastdist.processes.terminal import fitted, note, show, width_of

_T = TypeVar("_T")

_FAILED = 1
_USAGE = 2
_INTERRUPTED = 130


def run_command(options: argparse.Namespace) -> int:
    """Measure one collective; return an exit code as `run_planned` does."""

    def run(plan: Plan) -> bool:
        report = _measure(options, plan)
        _write_files(options, report)
        return not (report.wrong or report.failed)

    return run_planned(lambda: make_plan(options), run)


def run_planned(make: Callable[[], _T], run: Callable[[_T], bool]) -> int:
    """Make a plan of the options and run it.

    Args:
        make: Function that raises ValueError or ImportError for bad options or missing libraries.
        run: Function that returns False if an engine failed or fastdist's results were wrong.

    Returns:
        0; 1 if `run` returned False or failed; 2 if `make` failed; 130 if interrupted.
    """
    try:
        plan = make()
    except (ValueError, ImportError) as error:
        note(f"fastdist bench: {error}")
        return _USAGE
    try:
        with _ended_like_interrupted():
            return 0 if run(plan) else _FAILED
    except (EngineError, OSError) as error:
        note(f"fastdist bench: {error}")
        return _FAILED
    except KeyboardInterrupt:
        note("fastdist bench: interrupted")
        return _INTERRUPTED


def _measure(options: argparse.Namespace, plan: Plan) -> Report:
    file = _table_file(options)
    busy = busy_cores()
    steps = len(plan.cases) * plan.effort.rounds
    title = f"{options.collective} of {options.model}" if options.model else options.collective
    with (
        shown_progress(file, steps) as progress,
        Session(plan.engines, plan.ranks, plan.effort, plan.placement) as session,
    ):
        report = Report(
            plan.ranks,
            machine_facts() | (gpu_facts() if plan.placement else {}),
            session.versions,
            {peer.name: peer.install for peer in plan.missing},
            placement=plan.placement,
            failed={error.engine: error.reason for error in session.failures},
            busy_cores=busy,
        )
        for error in session.failures:
            note(f"fastdist bench: {error}")
        lines = text.heading(report, title)
        width = width_of(file)
        if not options.model:
            _, *peers = session.versions
            lines += text.column_lines(peers, plan.placement is not None, width)
        for line in lines:
            progress.line(line)
        noted: set[str] = set()
        for case in plan.cases:
            progress.begin(case.label)
            row = session.measure(case, progress.step)
            report.rows.append(row)
            notes = [note for note in text.row_notes(row) if note not in noted]
            noted.update(notes)
            lines = (text.list_lines if options.model else text.row_lines)(row, width)
            for line in lines + notes:
                progress.line(line)
        report.copy_gb_per_s = session.copy_gb_per_s
        for line in text.footing(report):
            progress.line(line)
    return report


def _table_file(options: argparse.Namespace) -> TextIO:
    return sys.stderr if options.json == "-" else sys.stdout


def _write_files(options: argparse.Namespace, report: Report) -> None:
    if options.json == "-":
        show(text.to_json(report))
    elif options.json:
        Path(options.json).write_text(text.to_json(report))
    if options.plot:
        write_plot(report, Path(options.plot))
    for name in (options.json, options.plot):
        if name not in (None, "-"):
            file = _table_file(options)
            show(fitted(f"# wrote {Path(name)}\n", file), file)


@contextlib.contextmanager
def _ended_like_interrupted() -> Iterator[None]:
    """Handle SIGTERM like Ctrl-C, so that no rank is left running."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
