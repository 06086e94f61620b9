"""Runs `fastdist bench` from its parsed options: cases, engines, table, files."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType

from fastdist.cli.bench import report as text
from fastdist.cli.bench.cases import Case, array_cases, list_case, parse_sizes
from fastdist.cli.bench.machine import machine_facts, usable_cores
from fastdist.cli.bench.peers import Engine, MissingPeer, fastdist_engine, find_peer, parse_peers
from fastdist.cli.bench.plot import check_plot, write_plot
from fastdist.cli.bench.processes import EngineError
from fastdist.cli.bench.progress import shown_progress
from fastdist.cli.bench.results import Report
from fastdist.cli.bench.session import ROUNDS, Effort, Session

_FAILED = 1
_USAGE = 2
_INTERRUPTED = 130

_MOST_ITERATIONS = 1_000_000


def run_command(options: argparse.Namespace) -> int:
    """Runs the bench.

    Returns:
        0; 1 if an engine failed or fastdist's results were wrong; 2 for options that make no
        sense or lack an extra; 130 when interrupted.
    """
    try:
        cases = _cases(options)
        effort = _effort(options)
        engines, missing = _engines(options)
        _check_files(options)
    except (ValueError, ImportError) as error:
        print(f"fastdist bench: {error}", file=sys.stderr)
        return _USAGE
    try:
        with _ended_like_interrupted():
            report = _measure(options, cases, effort, engines, missing)
    except EngineError as error:
        print(f"fastdist bench: {error}", file=sys.stderr)
        return _FAILED
    except KeyboardInterrupt:
        print("fastdist bench: interrupted", file=sys.stderr)
        return _INTERRUPTED
    _write_files(options, report)
    return _FAILED if report.wrong else 0


def _ranks(options: argparse.Namespace) -> int:
    ranks: int = max(2, usable_cores()) if options.ranks is None else options.ranks
    if ranks < 1:
        raise ValueError(f"expected --ranks of at least 1, got {ranks}")
    if ranks == 1 and options.collective == "send_recv":
        raise ValueError("send_recv needs --ranks of at least 2, got 1")
    return ranks


def _cases(options: argparse.Namespace) -> tuple[Case, ...]:
    if options.dtype == "bfloat16" and options.array != "torch":
        raise ValueError("numpy has no bfloat16: use --array torch")
    if options.redop == "mean" and "int" in options.dtype:
        raise ValueError(f"--op mean needs a floating point dtype, got {options.dtype}")
    if options.model:
        if options.collective != "all_reduce":
            raise ValueError(f"--list is for all_reduce, got {options.collective}")
        return (list_case(options.model, options.dtype, options.redop, options.array),)
    sizes = parse_sizes(options.sizes, options.factor)
    return array_cases(
        options.collective, sizes, _ranks(options), options.dtype, options.redop, options.array
    )


def _effort(options: argparse.Namespace) -> Effort:
    for name, least in (("iters", 1), ("warmup", 0), ("time_s", 0), ("timeout_s", 0)):
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
        bind=options.bind,
        timeout_s=options.timeout_s,
    )


def _engines(options: argparse.Namespace) -> tuple[list[Engine], list[MissingPeer]]:
    ranks = _ranks(options)
    names = parse_peers(options.vs) if options.vs else ()
    found = [find_peer(name, ranks, options.peers_dir) for name in names]
    missing = [peer for peer in found if isinstance(peer, MissingPeer)]
    return [fastdist_engine(ranks), *(p for p in found if isinstance(p, Engine))], missing


def _check_files(options: argparse.Namespace) -> None:
    """Finds out before the run what could not be written after it."""
    if options.plot:
        check_plot(Path(options.plot))
    for name in (options.json, options.csv, options.plot):
        if name in (None, "-"):
            continue
        folder = Path(name).absolute().parent
        if not os.access(folder, os.W_OK):
            raise ValueError(
                f"cannot write {name}: {folder} is not a folder that can be written to"
            )


def _measure(
    options: argparse.Namespace,
    cases: Sequence[Case],
    effort: Effort,
    engines: Sequence[Engine],
    missing: Sequence[MissingPeer],
) -> Report:
    ranks = _ranks(options)
    file = sys.stderr if options.json == "-" else sys.stdout
    steps = len(cases) * effort.rounds
    title = f"{options.collective} of {options.model}" if options.model else options.collective
    with shown_progress(file, steps) as progress, Session(engines, ranks, effort) as session:
        report = Report(
            ranks, machine_facts(), session.versions, {peer.name: peer.install for peer in missing}
        )
        lines = text.heading(report, title)
        if not options.model:
            lines += text.column_lines([engine.name for engine in engines[1:]])
        for line in lines:
            progress.line(line)
        noted: set[str] = set()
        for case in cases:
            progress.begin(case.label)
            row = session.measure(case, progress.step)
            report.rows.append(row)
            notes = [note for note in text.row_notes(row) if note not in noted]
            noted.update(notes)
            lines = text.list_lines(row) if options.model else [text.row_line(row)]
            for line in lines + notes:
                progress.line(line)
        report.copy_gb_per_s = session.copy_gb_per_s
        for line in text.footing(report):
            progress.line(line)
    return report


def _write_files(options: argparse.Namespace, report: Report) -> None:
    if options.json == "-":
        text.write_json(report, sys.stdout)
    elif options.json:
        with Path(options.json).open("w") as file:
            text.write_json(report, file)
    if options.csv:
        with Path(options.csv).open("w", newline="") as file:
            text.write_csv(report, file)
    if options.plot:
        write_plot(report, Path(options.plot))


@contextlib.contextmanager
def _ended_like_interrupted() -> Iterator[None]:
    """SIGTERM ends the bench as Ctrl-C does, so that no rank is left behind."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
