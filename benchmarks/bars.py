"""Checks fastdist's speed and memory against the required figures, called bars.

    python benchmarks/bars.py [--only all_reduce list ...] [--time-s 1]

Prints a line per bar and writes all bars, their figures and facts about the machine into
benchmarks/results. Exits with 1 if a bar was missed. The times of a ratio are measured side by side
in one run; see README.md.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fastdist.cli.bench.cases import Case, array_cases, list_case
from fastdist.cli.bench.peers import MPI_NAMES, fastdist_engine, find_peers
from fastdist.cli.bench.report import Table, row_object
from fastdist.cli.bench.results import Row
from fastdist.cli.bench.session import Effort, Session
from fastdist.cli.machine_facts import machine_facts
from fastdist.cli.sizes import format_size, parse_size
from fastdist.errors import FastdistError

_FOLDER = Path(__file__).parent
_OTHER_COLLECTIVES = (
    "reduce",
    "broadcast",
    "all_gather",
    "gather",
    "scatter",
    "reduce_scatter",
    "all_to_all",
    "send_recv",
)
# All-reduce of two ranks: minimum time of the fastest MPI, and of gloo, divided by fastdist's.
_ALL_REDUCE_BARS = {
    "8": (1.5, 100),
    "1K": (1.5, 100),
    "64K": (1.0, 40),
    "1M": (1.3, 8),
    "16M": (1.5, 6),
    "64M": (3.0, 6),
    "256M": (3.0, 6),
}
_FLOOR_SIZES = ("16M", "64M", "256M")
_FLOOR_BARS = {"numpy": 70, "empty": 88}
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Bar:
    """A requirement and its measured figure; `measured` is NaN if a peer is missing."""

    name: str
    measured: float
    least: float = -math.inf
    most: float = math.inf
    unit: str = ""

    @property
    def verdict(self) -> str:
        """`pass`, `MISS`, or `skip` if the peer is missing."""
        if math.isnan(self.measured):
            return "skip"
        return "pass" if self.least <= self.measured <= self.most else "MISS"

    def __str__(self) -> str:
        needed = f">= {self.least:g}" if self.least > -math.inf else f"<= {self.most:g}"
        measured = f"{self.measured:.3g}{self.unit}"
        return f"{self.verdict}  {self.name:<58} {measured:>10}   ({needed}{self.unit})"


class Bench:
    """Measures cases for the bars, and keeps the rows."""

    def __init__(self, time_s: float) -> None:
        self.rows: list[dict[str, Any]] = []
        self.engines: dict[str, str] = {}
        self._effort = Effort(time_s=time_s)

    def measure(
        self, ranks: int, peers: Sequence[str], cases: Sequence[Case]
    ) -> Iterator[tuple[Case, Row]]:
        """Measures cases side by side with the installed peers."""
        engines, missing = find_peers(peers, ranks)
        for name, install in missing.items():
            print(f"# {name} is not installed here; to compare with it: {install}")
        with Session([fastdist_engine(ranks), *engines], ranks, self._effort) as session:
            if session.failures:
                raise session.failures[0]
            self.engines.update(session.versions)
            for case in cases:
                row = session.measure(case)
                print(f"# {case.collective} {case.array}{Table(()).row(row)[0]}", flush=True)
                self.rows.append({"ranks": ranks, **row_object(row)})
                yield case, row


def _times_as_fast(row: Row, engines: Sequence[str]) -> float:
    """Returns the time of the fastest of `engines` divided by fastdist's; NaN without figures."""
    ratios = [row.times_as_fast(other) for other in row.others if other.engine in engines]
    return min((ratio for ratio in ratios if ratio is not None), default=math.nan)


def _right(row: Row) -> Bar:
    name = f"{row.case.collective} {format_size(row.case.bytes)} {row.case.array}: wrong elements"
    return Bar(name, row.ours.wrong, most=0)


def all_reduce(bench: Bench) -> Iterator[Bar]:
    """One array on two ranks, against gloo, MPI and the memory floor."""
    cases: list[Case] = []
    for array in ("numpy", "torch", "empty"):
        sizes = _FLOOR_SIZES if array == "empty" else tuple(_ALL_REDUCE_BARS)
        cases += array_cases("all_reduce", [parse_size(size) for size in sizes], 2, array=array)
    for case, row in bench.measure(2, ("gloo", *MPI_NAMES), cases):
        size = format_size(case.bytes)
        name = f"all_reduce {size} {case.array}"
        yield _right(row)
        against_mpi, against_gloo = _ALL_REDUCE_BARS[size]
        if case.array != "empty":
            yield Bar(
                f"{name}: against the fastest MPI", _times_as_fast(row, MPI_NAMES), against_mpi
            )
            yield Bar(f"{name}: against gloo", _times_as_fast(row, ("gloo",)), against_gloo)
        if case.array in _FLOOR_BARS and size in _FLOOR_SIZES:
            least = _FLOOR_BARS[case.array]
            yield Bar(f"{name}: of the memory floor", row.floor_percent, least, unit=" %")


def steady(bench: Bench) -> Iterator[Bar]:
    """Twenty jobs: the host of a virtual machine moves its cores nearer together and apart."""
    cases = [
        *array_cases("all_reduce", (1 << 20,), 2, array="numpy"),
        *array_cases("all_reduce", (1 << 20,), 2, array="empty"),
    ]
    wrong, slowest, against_mpi = 0, 0.0, math.inf
    for _ in range(20):
        rows = [row for _, row in bench.measure(2, MPI_NAMES, 5 * cases)]
        wrong += sum(row.ours.wrong for row in rows)
        ratios = [a.ours.p50_us / b.ours.p50_us for a, b in zip(rows[::2], rows[1::2], strict=True)]
        slowest = max(slowest, statistics.median(ratios))
        faster = [_times_as_fast(row, MPI_NAMES) for row in rows[::2]]
        against_mpi = min(against_mpi, statistics.median(faster))
    yield Bar("all_reduce 1M of 20 jobs: wrong elements", wrong, most=0)
    yield Bar("all_reduce 1M of 20 jobs: slowest, times comm.empty", slowest, most=3.2)
    yield Bar("all_reduce 1M of 20 jobs: against the fastest MPI", against_mpi, 1)


def gradient_list(bench: Bench) -> Iterator[Bar]:
    """ResNet-50's gradients as a list."""
    for array in ("numpy", "torch"):
        name = f"161 gradients {array}"
        case = list_case("resnet50", "float32", "sum", array)
        cases = [case, *array_cases("all_reduce", (case.bytes,), 2, array=array)]
        rows = [row for _, row in bench.measure(2, ("gloo",), 3 * cases)]
        yield Bar(f"{name}: wrong elements", sum(row.ours.wrong for row in rows), most=0)
        lists = rows[::2]
        one_array = [a.ours.p50_us / b.ours.p50_us for a, b in zip(lists, rows[1::2], strict=True)]
        ratio = statistics.median(one_array)
        yield Bar(f"{name}: time of one call on the same bytes", ratio, most=1.15)
        buckets = statistics.median(_times_as_fast(row, ("gloo",)) for row in lists)
        yield Bar(f"{name}: against gloo in 25 MB buckets", buckets, 6)


def oversubscribed(bench: Bench) -> Iterator[Bar]:
    """More ranks than cores."""
    for ranks in (4, 8):
        cases = array_cases("all_reduce", (1 << 10, 1 << 20), ranks)
        for case, row in bench.measure(ranks, ("gloo",), cases):
            yield _right(row)
            name = f"all_reduce {format_size(case.bytes)}, {ranks} ranks: against gloo"
            yield Bar(name, _times_as_fast(row, ("gloo",)), 3)


def other_collectives(bench: Bench) -> Iterator[Bar]:
    """The other collectives, against the fastest MPI."""
    cases: list[Case] = []
    for collective in _OTHER_COLLECTIVES:
        cases += array_cases(collective, (1 << 10, 1 << 20, 64 << 20), 2)
    for case, row in bench.measure(2, MPI_NAMES, cases):
        yield _right(row)
        name = f"{case.collective} {format_size(case.bytes)}: against the fastest MPI"
        yield Bar(name, _times_as_fast(row, MPI_NAMES), 1)


def _figures_of_ranks(script: str, ranks: int) -> list[dict[str, float]]:
    """Runs a script of this folder; returns the JSON object that each rank prints."""
    launcher = [sys.executable, "-m", "fastdist", "run", "--no-prefix", "-n", str(ranks)]
    output = subprocess.run(
        [*launcher, str(_FOLDER / script)], stdout=subprocess.PIPE, text=True, check=True
    ).stdout
    return [json.loads(line) for line in output.splitlines()]


def idle(bench: Bench) -> Iterator[Bar]:
    """Processor time of ranks that wait for a late rank."""
    for ranks in (2, 8):
        figures = _figures_of_ranks("idle_rank.py", ranks)
        share = max(figure["core_percent"] for figure in figures)
        yield Bar(f"an idle rank of {ranks}: share of a core", share, most=2, unit=" %")


def memory(bench: Bench) -> Iterator[Bar]:
    """Memory beyond the caller's arrays, and its growth over many calls."""
    figures = _figures_of_ranks("memory_growth.py", 2)
    staging = sum(figure["staging_bytes"] for figure in figures) / len(figures) / _MIB
    growth = max(figure["growth_bytes"] for figure in figures) / _MIB
    yield Bar("staging memory per rank", staging, most=8, unit=" MiB")
    yield Bar("growth over 100,000 calls", growth, most=0.5, unit=" MiB")


_SECTIONS: dict[str, Callable[[Bench], Iterator[Bar]]] = {
    "all_reduce": all_reduce,
    "steady": steady,
    "list": gradient_list,
    "oversubscribed": oversubscribed,
    "idle": idle,
    "memory": memory,
    "others": other_collectives,
}


def with_failure(section: str, bars: Iterator[Bar]) -> Iterator[Bar]:
    """Yields a section's bars; a failure is a missed bar and does not end the other sections."""
    try:
        yield from bars
    except (FastdistError, subprocess.CalledProcessError) as error:
        print(f"# {error}")
        yield Bar(f"{section}: failures", 1, most=0)


def main() -> int:
    """Checks the bars; 1 if one was missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=tuple(_SECTIONS), default=tuple(_SECTIONS))
    parser.add_argument("--time-s", type=float, default=1.0, help="seconds per case and engine")
    parser.add_argument("--out", type=Path, help="default: results/bars-<date>.json")
    options = parser.parse_args()
    machine = machine_facts()
    bench = Bench(options.time_s)
    bars: list[Bar] = []
    for section in options.only:
        bars += printed(with_failure(section, _SECTIONS[section](bench)))
    out = options.out or _FOLDER / "results" / f"bars-{machine['date']}.json"
    facts = {"machine": machine, "engines": bench.engines}
    return write_results(out, facts, bars, bench.rows)


def printed(bars: Iterator[Bar]) -> Iterator[Bar]:
    """Prints and yields each bar."""
    for bar in bars:
        print(bar, flush=True)
        yield bar


def write_results(
    out: Path, facts: dict[str, Any], bars: Sequence[Bar], rows: Sequence[dict[str, Any]]
) -> int:
    """Writes the results; returns 1 if a bar was missed, else 0."""
    missed = sum(bar.verdict == "MISS" for bar in bars)
    print(f"{len(bars)} bars, {missed} missed")
    out.parent.mkdir(exist_ok=True)
    checked = [{**_finite(asdict(bar)), "verdict": bar.verdict} for bar in bars]
    out.write_text(json.dumps({**facts, "bars": checked, "rows": rows}, indent=1) + "\n")
    print(f"wrote {out}")
    return 1 if missed else 0


def _finite(fields: dict[str, Any]) -> dict[str, Any]:
    """Replaces NaN and infinity, which JSON lacks, by None."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in fields.items()
    }


if __name__ == "__main__":
    sys.exit(main())
