"""Runs `fastdist bench pack`: prints the table, writes the files."""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

import fastdist._core as _core
from fastdist.cli.bench.caveats import call_warnings, load_average, load_warnings
from fastdist.cli.bench.gpu import open_gpu
from fastdist.cli.bench.machine import gpu_facts, machine_facts
from fastdist.cli.bench.options import check_files, require_torch, written_lines
from fastdist.cli.bench.pack import CALLS_PER_TURN, PackBench, PackCase, PackRow
from fastdist.cli.bench.placement import place_ranks
from fastdist.cli.bench.progress import shown_progress

_FAILED = 1
_USAGE = 2
_INTERRUPTED = 130

_MODELS = ("resnet50", "gpt2")
_ROUNDS = 10
_COLUMNS = (
    ("p50 us", 11),
    ("p99 us", 11),
    ("GB/s", 9),
    ("copy %", 8),
    ("wrong", 7),
    ("ratio", 8),
)
_WAY_WIDTH = 44


def run_pack(options: argparse.Namespace) -> int:
    """Runs the bench; returns an exit code as `run_command` does."""
    try:
        cases = pack_cases(options)
        check_files(options)
        placement = place_ranks(1)
        require_torch()
        gpu = open_gpu(0)
    except (ValueError, ImportError, RuntimeError) as error:
        print(f"fastdist bench: {error}", file=sys.stderr)
        return _USAGE
    bench = PackBench(gpu, bool(options.vs), _core.NCCL_BUCKET_BYTES, _rounds(options))
    machine = machine_facts() | gpu_facts()
    file = sys.stderr if options.json == "-" else sys.stdout
    load = load_warnings(load_average(), 1)
    rows: list[PackRow] = []
    try:
        with shown_progress(file, len(cases)) as progress:
            progress.line("# fastdist bench pack: copies gradients into and out of buckets")
            progress.line(f"# {placement}; CUDA {machine['cuda driver']}")
            progress.line(heading())
            for case in cases:
                progress.begin(case.label)
                found = bench.measure(case)
                rows += found
                for row in found:
                    progress.line(row_line(row))
                progress.step()
            progress.line(f"# a plain copy moves {bench.copy_gb_per_s:.0f} GB/s (read and written)")
            for warning in load + pack_warnings(rows):
                progress.line(f"# warning: {warning}")
    except KeyboardInterrupt:
        print("fastdist bench: interrupted", file=sys.stderr)
        return _INTERRUPTED
    _write_files(options, rows, machine, bench.copy_gb_per_s)
    for line in written_lines(options):
        print(line, file=file)
    return _FAILED if any(row.wrong for row in rows if row.way == "fastdist") else 0


def pack_cases(options: argparse.Namespace) -> list[PackCase]:
    """Returns each list without a cast and, if its dtype allows, cast to bfloat16.

    Raises:
        ValueError: An option is invalid for pack.
    """
    for name in ("ranks", "plot"):
        if getattr(options, name) is not None:
            raise ValueError(f"--{name} is for collectives, not for pack")
    if options.device == "cpu":
        raise ValueError("pack is for GPUs: the host engine has no buckets")
    if options.vs not in ("", "torch"):
        raise ValueError(f"expected --vs torch, which also flattens lists, got {options.vs!r}")
    if options.array not in (None, "torch"):
        raise ValueError(f"expected --array torch, got {options.array!r}")
    if options.iters is not None and options.iters < 1:
        raise ValueError(f"expected --iters of at least 1, got {options.iters}")
    narrower = ("", "bf16") if options.dtype in ("float32", "float64") else ("",)
    models = (options.model,) if options.model else _MODELS
    return [PackCase(model, options.dtype, wire) for model in models for wire in narrower]


def _rounds(options: argparse.Namespace) -> int:
    return _ROUNDS if options.iters is None else -(-options.iters // CALLS_PER_TURN)


def pack_warnings(rows: Sequence[PackRow]) -> list[str]:
    """Warnings if the machine was busy during the run, or timed calls were few."""
    return call_warnings(
        [f"{row.case.label}, {row.way} {row.direction}" for row in rows],
        [row.p99_us / row.p50_us for row in rows],
        [row.iterations for row in rows],
    )


def heading() -> str:
    """Returns the line of column names."""
    names = "".join(name.rjust(width) for name, width in _COLUMNS)
    return "# list, way and direction".ljust(_WAY_WIDTH) + names


def row_line(row: PackRow) -> str:
    """Formats one line of the table."""
    is_ours = row.way == "fastdist"
    cells = (
        f"{row.p50_us:.1f}",
        f"{row.p99_us:.1f}",
        f"{row.gb_per_s:.0f}",
        f"{row.copy_percent:.0f}",
        str(row.wrong),
        "" if is_ours else f"{row.times_as_fast:.2f}x",
    )
    line = f"{row.case.label}, {row.way} {row.direction}".ljust(_WAY_WIDTH)
    line += "".join(cell.rjust(width) for cell, (_, width) in zip(cells, _COLUMNS, strict=True))
    return line.rstrip()


def _write_files(
    options: argparse.Namespace,
    rows: Sequence[PackRow],
    machine: dict[str, str],
    copy_gb_per_s: float,
) -> None:
    found = [row_object(row) for row in rows]
    report = {"machine": machine, "copy_gb_per_s": round(copy_gb_per_s, 1), "rows": found}
    if options.json == "-":
        _write_json(report, sys.stdout)
    elif options.json:
        with Path(options.json).open("w") as file:
            _write_json(report, file)
    if options.csv:
        with Path(options.csv).open("w", newline="") as file:
            writer = csv.DictWriter(file, list(found[0]))
            writer.writeheader()
            writer.writerows(found)


def row_object(row: PackRow) -> dict[str, Any]:
    """Converts a row for JSON and CSV."""
    fields = asdict(row)
    case = fields.pop("case")
    figures = {
        name: round(value, 3) if isinstance(value, float) else value
        for name, value in fields.items()
    }
    return {**case, "traffic_bytes": row.case.traffic_bytes, **figures}


def _write_json(report: dict[str, Any], file: TextIO) -> None:
    json.dump(report, file, indent=2)
    file.write("\n")
