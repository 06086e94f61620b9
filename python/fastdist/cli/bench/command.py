"""Runs `fastdist bench OP` and `fastdist bench report`: checks the options, measures, writes.

A report measures every collective next to every installed peer, in several passes. A pass starts
all engines anew, and the samples of a figure are the passes' medians (results.py). They cover what
differs from start to start, such as where arrays lie, and what else the machine does over minutes.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import signal
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

import fastdist._core as _core
from fastdist.cli.bench import peers
from fastdist.cli.bench import report as text
from fastdist.cli.bench.cases import COLLECTIVES, DEVICE_ARRAYS, Case, array_cases, list_case
from fastdist.cli.bench.plot import write_plot
from fastdist.cli.bench.results import SAMPLES, Report, Row, combined, place_ranks
from fastdist.cli.bench.session import ROUNDS, Effort, EngineError, Session
from fastdist.cli.command import UsageError, check_plot
from fastdist.cli.machine_facts import gpu_facts, machine_facts, usable_cores
from fastdist.cli.sizes import parse_sizes
from fastdist.processes.terminal import fitted, note, show, width_of

_FAILED = 1
_INTERRUPTED = 130
_REPORT_ALL_REDUCE_SIZES = parse_sizes("8,1K,64K,1M,16M,64M")
_REPORT_OTHER_SIZES = parse_sizes("1K,1M")
_REPORT_EFFORT = Effort(time_s=0.1, warmup=1, rounds=1, timeout_s=60.0)


@dataclass(frozen=True, slots=True)
class Plan:
    """A checked run of fastdist and the installed peers."""

    report: Report  # what is known before
    cases: tuple[Case, ...]
    effort: Effort
    engines: list[peers.Engine]
    files: Sequence[Path]  # to write


def run_command(options: argparse.Namespace) -> int:
    """Measure one collective, or a report, and write; return an exit code.

    It is 1 if results are wrong or an engine has failed, 130 if interrupted, also by SIGTERM.
    """
    is_report = options.collective == "report"
    try:
        plan = (_plan_report if is_report else make_plan)(options)
    except ValueError as error:  # later ones are defects
        raise UsageError(str(error)) from None
    handler = signal.signal(signal.SIGTERM, signal.default_int_handler)  # leaves no rank running
    try:
        (_run_report if is_report else _run)(options, plan)
        is_wrong = any(row.ours.wrong for row in plan.report.rows)
        return _FAILED if is_wrong or plan.report.failed else 0
    except (EngineError, OSError) as error:
        note(f"fastdist bench: {error}")
        return _FAILED
    except KeyboardInterrupt:
        note("fastdist bench: interrupted")
        return _INTERRUPTED
    finally:
        signal.signal(signal.SIGTERM, handler)


def make_plan(options: argparse.Namespace) -> Plan:
    """Make a plan of the options, and check that its files can be written."""
    if options.ranks == 1 and options.collective == "send_recv":
        raise ValueError("send_recv needs --ranks of at least 2, got 1")
    on_cpu, through_torch = options.device == "cpu", options.through == "torch"
    ranks = options.ranks or max(2, usable_cores() if on_cpu else len(_core.cuda_devices()))
    cases = _cases(options, ranks)
    effort = Effort(options.time_s, options.iters, rounds=min(ROUNDS, options.iters or ROUNDS))
    names = peers.parse_peers(options.vs, options.device) if options.vs else ()
    others, missing = peers.find_peers(names, ranks)
    report = Report(ranks, machine_facts(), {}, missing)
    if not on_cpu:
        if options.collective == "barrier":
            raise ValueError("barrier is for --device cpu: on GPUs, the host waits")
        if options.array == "empty" and options.collective in ("gather", "scatter"):
            raise ValueError(
                "--array empty: every rank must call comm.empty for GPUs, and only the root of a "
                f"{options.collective} has a buffer of all blocks"
            )
        report.placement = place_ranks(ranks)
        report.machine |= gpu_facts()
    if (through_torch or not on_cpu) and importlib.util.find_spec("torch") is None:
        option = "--through torch" if through_torch else "--device cuda"
        raise ImportError(f"{option} needs torch: pip install torch")
    files = [Path(name) for name in (options.json, options.plot) if name not in (None, "-")]
    if options.plot:
        if len(cases) == 1:
            raise ValueError("--plot draws figures over the size: expected several sizes, got one")
        check_plot(Path(options.plot))
    for file in files:
        if not os.access(folder := file.absolute().parent, os.W_OK):
            raise ValueError(f"cannot write {file}: {folder} is not a writable folder")
    ours = peers.fastdist_engine(ranks, options.device, through_torch)
    return Plan(report, cases, effort, [ours, *others], files)


def _cases(options: argparse.Namespace, ranks: int) -> tuple[Case, ...]:
    possible = DEVICE_ARRAYS[options.device]
    array: str = options.array or ("torch" if options.through else possible[0])
    made_by = "numpy" if array == "empty" and options.device == "cpu" else array
    if options.through and (options.device != "cpu" or array != "torch"):
        raise ValueError("--through torch is for torch tensors on --device cpu")
    if array not in possible:
        raise ValueError(
            f"expected --array for --device {options.device} out of {', '.join(possible)}, "
            f"got {array!r}"
        )
    if options.dtype == "bfloat16" and made_by == "numpy":
        raise ValueError("numpy has no bfloat16: use --array torch")
    if options.redop == "mean" and "int" in options.dtype:
        raise ValueError(f"--op mean needs a floating point dtype, got {options.dtype}")
    kind = {"dtype": options.dtype, "redop": options.redop, "array": array}
    if not options.model:
        return array_cases(options.collective, parse_sizes(options.sizes), ranks, **kind)
    if options.collective != "all_reduce":
        raise ValueError(f"--list is for all_reduce, got {options.collective}")
    return (list_case(options.model, **kind),)


def _run(options: argparse.Namespace, plan: Plan) -> None:
    """Measure the cases while the table is printed, and write the files."""
    report, file = plan.report, sys.stderr if options.json == "-" else sys.stdout
    with (
        Progress(file, len(plan.cases) * plan.effort.rounds) as progress,
        Session(plan.engines, report.ranks, plan.effort, report.placement) as session,
    ):
        report.engines = session.versions
        for error in session.failures:
            report.failed[error.engine] = error.reason
            note(f"fastdist bench: {error}")
        title = f"{options.collective} of {options.model}" if options.model else options.collective
        progress.line(*text.heading(report, title))
        _, *others = report.engines
        table = text.Table(others, report.placement is not None, width_of(file))
        progress.line(*table.header())
        for case in plan.cases:
            report.rows.append(session.measure(case, progress.update))
            progress.line(*table.row(report.rows[-1]))
        report.copy_gb_per_s = session.copy_gb_per_s
        progress.line(*text.footing(report))
    if options.json:
        as_json = json.dumps(text.report_object(report), indent=2) + "\n"
        if options.json == "-":
            show(as_json)
        else:
            Path(options.json).write_text(as_json)
    if options.plot:
        write_plot(report, Path(options.plot))
    for path in plan.files:
        show(fitted(f"# wrote {path}\n", file), file)


def report_cases(ranks: int) -> tuple[Case, ...]:
    """Return what a report measures, in its order."""
    arrays = array_cases("all_reduce", _REPORT_ALL_REDUCE_SIZES, ranks)
    cases = [*arrays, list_case("resnet50", "float32", "sum", "numpy")]
    for name in COLLECTIVES:
        if name != "all_reduce":
            cases += array_cases(name, _REPORT_OTHER_SIZES, ranks)
    return tuple(cases)


def _plan_report(options: argparse.Namespace) -> Plan:
    ranks = options.ranks or max(2, usable_cores())
    out = options.out or peers.cache_dir("reports") / f"{datetime.now(UTC):%Y-%m-%d-%H%M}.html"
    if out.suffix != ".html":
        raise ValueError(f"expected --out with the suffix .html, got {out}")
    check_plot(out.with_suffix(".svg"))
    if importlib.util.find_spec("jinja2") is None:
        raise ImportError("a report's page needs jinja2: pip install jinja2")
    out.parent.mkdir(parents=True, exist_ok=True)
    others, missing = peers.find_peers(peers.PEER_NAMES, ranks)
    report = Report(ranks, machine_facts(), {}, missing)
    engines = [peers.fastdist_engine(ranks), *others]
    files = [out, out.with_suffix(".json")]
    return Plan(report, report_cases(ranks), _REPORT_EFFORT, engines, files)


def _run_report(options: argparse.Namespace, plan: Plan) -> None:
    """Measure, and write the page and the JSON."""
    report, (html, json_path) = plan.report, plan.files
    began = time.monotonic()
    with Progress(sys.stderr, SAMPLES * len(plan.cases)) as progress:
        measure(plan, SAMPLES, progress)
    recorded = text.recorded_object(report, time.monotonic() - began)
    as_json = json.dumps(recorded, indent=1) + "\n"
    json_path.write_text(as_json)
    html.write_text(text.page(report, recorded), encoding="utf-8")
    lines = list(report.sentences)
    lines += [f"{name} is not installed: {how}" for name, how in report.missing.items()]
    lines += [*report.cautions, f"wrote {html} and {json_path}", ""]
    file = sys.stderr if options.json else sys.stdout
    show(fitted("\n".join(lines), file), file)
    if options.json:
        show(as_json)


def measure(plan: Plan, passes: int, progress: Progress) -> None:
    """Measure every case on every engine, `passes` times.

    A peer that fails is left out, and the pass in which it failed is repeated.
    """
    report, left = plan.report, plan.engines
    copies: list[float] = []
    done: list[list[Row]] = []
    began = time.monotonic()
    while len(done) < passes:
        left_s = (time.monotonic() - began) / max(1, len(done)) * (passes - len(done))
        time_left = f"{left_s / 60:.0f} min" if left_s > 90 else f"{left_s:.0f} s"
        about = f", about {time_left} left" if done else ""
        progress.line(f"pass {len(done) + 1} of {passes}{about}")
        try:
            with Session(left, report.ranks, plan.effort) as session:
                done.append([session.measure(case, progress.update) for case in plan.cases])
            copies.append(session.copy_gb_per_s)
            report.engines, failures = session.versions, session.failures
        except EngineError as failure:
            if failure.engine == left[0].name:
                raise
            failures = [failure]
        for error in failures:
            progress.line(f"fastdist bench: {error}")
            report.failed[error.engine] = error.reason
            left = [engine for engine in left if engine.name != error.engine]
    report.copy_gb_per_s = statistics.median(copies)
    report.rows = [combined(rows) for rows in zip(*done, strict=True)]


class Progress:
    """Prints lines, and below them a bar of rich, in a terminal if rich is installed.

    The bar is drawn between measurements only, never by a thread that takes a core from them.
    Without rich, a terminal gets a line per size on stderr instead.
    """

    def __init__(self, file: TextIO, steps: int) -> None:
        """Prepare a bar of `steps` steps; `with` shows it."""
        self._file = file
        self._bar: Any = None
        if file.isatty() and importlib.util.find_spec("rich") is not None:
            from rich import console, progress

            self._bar = progress.Progress(
                progress.TextColumn("{task.description}"),
                progress.BarColumn(),
                progress.TimeRemainingColumn(),
                console=console.Console(file=file),
                auto_refresh=False,
                transient=True,
            )
            self._task = self._bar.add_task("starting", total=steps)

    def __enter__(self) -> Progress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def line(self, *texts: str) -> None:
        """Print lines."""
        for line in texts:
            line = fitted(line, self._file)
            if self._bar is None:
                show(f"{line}\n", self._file)
            else:
                self._bar.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def update(self, label: str, steps: int = 0) -> None:
        """Show what is measured, and count finished steps."""
        if self._bar is not None:
            self._bar.update(self._task, description=label, advance=steps, refresh=True)
        elif self._file.isatty() and not steps:
            print(f"measuring {label} ...", file=sys.stderr, flush=True)
