"""Runs `fastdist bench OP`: checks the options, measures, prints the table, writes the files."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import fastdist._core as _core
from fastdist.cli.bench import report as text
from fastdist.cli.bench.cases import DEVICE_ARRAYS, Case, array_cases, list_case
from fastdist.cli.bench.peers import Engine, fastdist_engine, find_peers, parse_peers
from fastdist.cli.bench.plot import write_plot
from fastdist.cli.bench.results import Placement, Report, place_ranks
from fastdist.cli.bench.session import ROUNDS, Effort, EngineError, Session
from fastdist.cli.command import UsageError, check_plot
from fastdist.cli.machine_facts import gpu_facts, machine_facts, usable_cores
from fastdist.cli.sizes import parse_sizes
from fastdist.processes.terminal import fitted, note, show, width_of

_FAILED = 1
_INTERRUPTED = 130


@dataclass(frozen=True, slots=True)
class Plan:
    """A checked run of fastdist and the installed peers."""

    report: Report  # what is known before
    cases: tuple[Case, ...]
    effort: Effort
    engines: list[Engine]


def run_command(options: argparse.Namespace) -> int:
    """Measure one collective; return an exit code as `run_planned` does."""
    return run_planned(options, make_plan, _run)


def run_planned(
    options: argparse.Namespace,
    make_plan: Callable[[argparse.Namespace], Plan],
    run: Callable[[argparse.Namespace, Plan], Report],
) -> int:
    """Measure and write; return an exit code.

    It is 1 if results are wrong or an engine has failed, 130 if interrupted, also by SIGTERM.
    """
    try:
        plan = make_plan(options)
    except ValueError as error:  # later ones are defects
        raise UsageError(str(error)) from None
    handler = signal.signal(signal.SIGTERM, signal.default_int_handler)  # leaves no rank running
    try:
        report = run(options, plan)
        return _FAILED if report.wrong or report.failed else 0
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
    on_cpu = options.device == "cpu"
    ranks = options.ranks or max(2, usable_cores() if on_cpu else len(_core.cuda_devices()))
    cases = _cases(options, ranks)
    rounds = min(ROUNDS, options.iters or ROUNDS)
    effort = Effort(time_s=options.time_s, iterations=options.iters, rounds=rounds)
    names = parse_peers(options.vs, options.device) if options.vs else ()
    peers, missing = find_peers(names, ranks)
    ours = fastdist_engine(ranks, options.device, options.through == "torch")
    placement = None if on_cpu else _placement(options, ranks)
    if options.plot:
        if len(cases) == 1:
            raise ValueError("--plot draws figures over the size: expected several sizes, got one")
        check_plot(Path(options.plot))
    for name in _files(options):
        folder = Path(name).absolute().parent
        if not os.access(folder, os.W_OK):
            raise ValueError(f"cannot write {name}: {folder} is not a writable folder")
    machine = machine_facts() | ({} if on_cpu else gpu_facts())
    report = Report(ranks, machine, {}, missing, placement=placement)
    return Plan(report, cases, effort, [ours, *peers])


def _cases(options: argparse.Namespace, ranks: int) -> tuple[Case, ...]:
    array = _array(options)
    made_by = "numpy" if array == "empty" and options.device == "cpu" else array
    if options.dtype == "bfloat16" and made_by == "numpy":
        raise ValueError("numpy has no bfloat16: use --array torch")
    if options.redop == "mean" and "int" in options.dtype:
        raise ValueError(f"--op mean needs a floating point dtype, got {options.dtype}")
    if not options.model:
        kind = {"dtype": options.dtype, "redop": options.redop, "array": array}
        return array_cases(options.collective, parse_sizes(options.sizes), ranks, **kind)
    if options.collective != "all_reduce":
        raise ValueError(f"--list is for all_reduce, got {options.collective}")
    return (list_case(options.model, options.dtype, options.redop, array),)


def _array(options: argparse.Namespace) -> str:
    possible = DEVICE_ARRAYS[options.device]
    array: str = options.array or possible[0]
    if options.through == "torch":
        if options.device != "cpu" or options.array not in (None, "torch"):
            raise ValueError("--through torch is for torch tensors on --device cpu")
        _require_torch("--through torch needs torch")
        array = "torch"
    if array not in possible:
        raise ValueError(
            f"expected --array for --device {options.device} out of {', '.join(possible)}, "
            f"got {array!r}"
        )
    return array


def _require_torch(why: str) -> None:
    if importlib.util.find_spec("torch") is None:
        raise ImportError(f"{why}: pip install torch")


def _placement(options: argparse.Namespace, ranks: int) -> Placement:
    if options.collective == "barrier":
        raise ValueError("barrier is for --device cpu: on GPUs, the host waits")
    if options.array == "empty" and options.collective in ("gather", "scatter"):
        raise ValueError(
            "--array empty: every rank must call comm.empty for GPUs, and only the root of a "
            f"{options.collective} has a buffer of all blocks"
        )
    placement = place_ranks(ranks)
    _require_torch("--device cuda needs torch to make arrays there")
    return placement


def _files(options: argparse.Namespace) -> list[str]:
    return [name for name in (options.json, options.plot) if name not in (None, "-")]


def _run(options: argparse.Namespace, plan: Plan) -> Report:
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
        _, *peers = report.engines
        table = text.Table(peers, report.placement is not None, width_of(file))
        progress.line(*table.header())
        for case in plan.cases:
            progress.update(case.label)
            row = session.measure(case, partial(progress.update, case.label, 1))
            report.rows.append(row)
            progress.line(*table.row(row))
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
    for name in _files(options):
        show(fitted(f"# wrote {Path(name)}\n", file), file)
    return report


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
