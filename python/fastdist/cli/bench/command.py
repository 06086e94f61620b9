"""Runs `fastdist bench OP`: checks the options, measures, prints the table, writes the files."""

from __future__ import annotations

import argparse
import importlib.util
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import fastdist._core as _core
from fastdist.cli.bench import report as text
from fastdist.cli.bench.cases import DEVICE_ARRAYS, Case, array_cases, list_case
from fastdist.cli.bench.engine_ranks import EngineError
from fastdist.cli.bench.gpu import Placement, place_ranks
from fastdist.cli.bench.peers import Engine, fastdist_engine, find_peers, parse_peers
from fastdist.cli.bench.plot import write_plot
from fastdist.cli.bench.progress import shown_progress
from fastdist.cli.bench.results import Report
from fastdist.cli.bench.session import ROUNDS, Effort, Session
from fastdist.cli.command import UsageError
from fastdist.cli.machine_facts import busy_cores, gpu_facts, machine_facts, usable_cores
from fastdist.cli.plot_file import check_plot
from fastdist.cli.sizes import parse_sizes
from fastdist.processes.terminal import fitted, note, show, width_of

_FAILED = 1
_INTERRUPTED = 130
_MOST_ITERATIONS = 1_000_000


@dataclass(frozen=True, slots=True)
class Plan:
    """A checked run of fastdist and the installed peers, on GPUs if there is a `placement`."""

    ranks: int
    cases: tuple[Case, ...]
    effort: Effort
    engines: list[Engine]
    missing: dict[str, str]  # pip command by peer that is not installed
    placement: Placement | None = None


def run_command(options: argparse.Namespace) -> int:
    """Measure one collective; return an exit code as `run_measured` does."""
    with unusable_options():
        plan = make_plan(options)

    def measure() -> bool:
        report = _measure(options, plan)
        _write_files(options, report)
        return not (report.wrong or report.failed)

    return run_measured(measure)


@contextmanager
def unusable_options() -> Iterator[None]:
    """Raise UsageError for ValueError and ImportError."""
    try:
        yield
    except (ValueError, ImportError) as error:
        raise UsageError(str(error)) from None


def run_measured(measure: Callable[[], bool]) -> int:
    """Run a measurement. SIGTERM is handled like Ctrl-C.

    Returns:
        0; 1 if `measure` returned False or failed; 130 if interrupted.
    """
    handler = signal.signal(signal.SIGTERM, signal.default_int_handler)  # leaves no rank running
    try:
        return 0 if measure() else _FAILED
    except (EngineError, OSError) as error:
        note(f"fastdist bench: {error}")
        return _FAILED
    except KeyboardInterrupt:
        note("fastdist bench: interrupted")
        return _INTERRUPTED
    finally:
        signal.signal(signal.SIGTERM, handler)


def make_plan(options: argparse.Namespace) -> Plan:
    """Make a plan of the options."""
    cases, effort = _cases(options), _effort(options)
    engines, missing = _engines(options)
    placement = _placement(options)
    _check_files(options)
    return Plan(_ranks(options), cases, effort, engines, missing, placement)


def _ranks(options: argparse.Namespace) -> int:
    ranks: int | None = options.ranks
    if ranks is None:
        return max(2, usable_cores() if options.device == "cpu" else len(_core.cuda_devices()))
    if ranks < 1:
        raise ValueError(f"expected --ranks of at least 1, got {ranks}")
    if ranks == 1 and options.collective == "send_recv":
        raise ValueError("send_recv needs --ranks of at least 2, got 1")
    return ranks


def _cases(options: argparse.Namespace) -> tuple[Case, ...]:
    array = _array(options)
    made_by = "numpy" if array == "empty" and options.device == "cpu" else array
    if options.dtype == "bfloat16" and made_by == "numpy":
        raise ValueError("numpy has no bfloat16: use --array torch")
    if options.redop == "mean" and "int" in options.dtype:
        raise ValueError(f"--op mean needs a floating point dtype, got {options.dtype}")
    if options.model:
        if options.collective != "all_reduce":
            raise ValueError(f"--list is for all_reduce, got {options.collective}")
        return (list_case(options.model, options.dtype, options.redop, array),)
    what = (options.collective, parse_sizes(options.sizes), _ranks(options))
    return array_cases(*what, options.dtype, options.redop, array)


def _array(options: argparse.Namespace) -> str:
    """Return the kind of arrays for fastdist's calls."""
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


def _effort(options: argparse.Namespace) -> Effort:
    for name, least in (("iters", 1), ("warmup", 0), ("time_s", 0)):
        value = getattr(options, name)
        if value is not None and value < least:
            raise ValueError(
                f"expected --{name.replace('_', '-')} of at least {least}, got {value}"
            )
    if options.iters is not None and options.iters > _MOST_ITERATIONS:
        raise ValueError(f"expected --iters of at most {_MOST_ITERATIONS}, got {options.iters}")
    return Effort(
        time_s=options.time_s,
        iterations=options.iters,
        warmup=options.warmup,
        rounds=min(ROUNDS, options.iters or ROUNDS),
        check=options.check,
        bind=options.device == "cpu",
        graph=options.device == "cuda",
    )


def _engines(options: argparse.Namespace) -> tuple[list[Engine], dict[str, str]]:
    ranks = _ranks(options)
    names = parse_peers(options.vs, options.device) if options.vs else ()
    peers, missing = find_peers(names, ranks, options.peers_dir)
    return [fastdist_engine(ranks, options.device, options.through == "torch"), *peers], missing


def _placement(options: argparse.Namespace) -> Placement | None:
    """Return the ranks' GPUs; None on CPUs."""
    if options.device == "cpu":
        return None
    if options.collective == "barrier":
        raise ValueError("barrier is for --device cpu: on GPUs, the host waits")
    if options.array == "empty" and options.collective in ("gather", "scatter"):
        raise ValueError(
            "--array empty: every rank must call comm.empty for GPUs, and only the root of a "
            f"{options.collective} has a buffer of all blocks"
        )
    placement = place_ranks(_ranks(options))
    _require_torch("--device cuda needs torch to make arrays there")
    return placement


def _check_files(options: argparse.Namespace) -> None:
    """Raise before the run if matplotlib is missing, or its files cannot be written."""
    if options.plot:
        check_plot(Path(options.plot))
    for name in _files(options):
        folder = Path(name).absolute().parent
        if not os.access(folder, os.W_OK):
            raise ValueError(f"cannot write {name}: {folder} is not a writable folder")


def _files(options: argparse.Namespace) -> list[str]:
    return [name for name in (options.json, options.plot) if name not in (None, "-")]


def _measure(options: argparse.Namespace, plan: Plan) -> Report:
    """Measure the cases while the table is printed."""
    file = sys.stderr if options.json == "-" else sys.stdout
    width = width_of(file)
    busy = busy_cores()
    steps = len(plan.cases) * plan.effort.rounds
    with (
        shown_progress(file, steps) as progress,
        Session(plan.engines, plan.ranks, plan.effort, plan.placement) as session,
    ):
        report = Report(
            plan.ranks,
            machine_facts() | (gpu_facts() if plan.placement else {}),
            session.versions,
            plan.missing,
            placement=plan.placement,
            failed={error.engine: error.reason for error in session.failures},
            busy_cores=busy,
        )
        for error in session.failures:
            note(f"fastdist bench: {error}")
        title = f"{options.collective} of {options.model}" if options.model else options.collective
        lines = text.heading(report, title)
        if not options.model:
            _, *peers = session.versions
            lines += text.column_lines(peers, plan.placement is not None, width)
        progress.lines(lines)
        noted: set[str] = set()
        for case in plan.cases:
            progress.begin(case.label)
            row = session.measure(case, progress.step)
            report.rows.append(row)
            notes = [note for note in text.row_notes(row) if note not in noted]
            noted.update(notes)
            progress.lines((text.list_lines if options.model else text.row_lines)(row, width))
            progress.lines(notes)
        report.copy_gb_per_s = session.copy_gb_per_s
        progress.lines(text.footing(report))
    return report


def _write_files(options: argparse.Namespace, report: Report) -> None:
    if options.json == "-":
        show(text.to_json(report))
    elif options.json:
        Path(options.json).write_text(text.to_json(report))
    if options.plot:
        write_plot(report, Path(options.plot))
    file = sys.stderr if options.json == "-" else sys.stdout
    for name in _files(options):
        show(fitted(f"# wrote {Path(name)}\n", file), file)
