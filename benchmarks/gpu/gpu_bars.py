"""Checks fastdist's speed and memory on GPUs against the required figures, called bars.

    python benchmarks/gpu/gpu_bars.py [--only all_reduce others list memory] [--time-s 1]

Two ranks share the first visible GPU. Prints a line per bar and writes all bars, their figures and
facts about the machine into benchmarks/results. Exits with 1 if a bar was missed, with 2 without a
GPU. The times of a ratio are measured side by side in one run; see README.md.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

_FOLDER = Path(__file__).parent
sys.path.insert(0, str(_FOLDER.parent))

from bars import Bar, printed, with_failure, write_results  # noqa: E402
from fastdist import _core  # noqa: E402
from fastdist.cli.bench.cases import COLLECTIVES, Case, array_cases, list_case  # noqa: E402
from fastdist.cli.bench.peers import (  # noqa: E402
    CUDA_PEER_NAMES,
    fastdist_engine,
    find_peers,
)
from fastdist.cli.bench.report import Table, row_object  # noqa: E402
from fastdist.cli.bench.results import Placement, Row, place_ranks  # noqa: E402
from fastdist.cli.bench.session import Effort, Session  # noqa: E402
from fastdist.cli.machine_facts import gpu_facts, machine_facts  # noqa: E402
from fastdist.cli.sizes import format_size, parse_sizes  # noqa: E402

_RANKS = 2
_SIZES = "8:256M"
_HOST_SIZES = (8, 1 << 10, 64 << 10, 1 << 20)
_OTHER_SIZES = (64 << 10, 64 << 20)
_MIB = 1 << 20


class GpuBench:
    """Measures cases for the bars, and keeps the rows."""

    def __init__(self, placement: Placement, time_s: float) -> None:
        self.rows: list[dict[str, Any]] = []
        self.engines: dict[str, str] = {}
        self._placement = placement
        self._effort = Effort(time_s=time_s)

    def measure(self, cases: Sequence[Case]) -> Iterator[tuple[Case, Row]]:
        """Measures cases side by side with torch's NCCL, if torch is installed."""
        peers, missing = find_peers(CUDA_PEER_NAMES, _RANKS)
        for name, install in missing.items():
            print(f"# {name} is not installed here; to compare with it: {install}")
        engines = [fastdist_engine(_RANKS, "cuda"), *peers]
        with Session(engines, _RANKS, self._effort, self._placement) as session:
            if session.failures:
                raise session.failures[0]
            self.engines.update(session.versions)
            for case in cases:
                row = session.measure(case)
                print(f"# {Table((), on_gpu=True).row(row)[0]}", flush=True)
                self.rows.append({"ranks": _RANKS, **row_object(row)})
                yield case, row


def all_reduce(bench: GpuBench) -> Iterator[Bar]:
    """One array: time on the GPU and time of the host."""
    sizes = parse_sizes(_SIZES)
    cases = array_cases("all_reduce", sizes, _RANKS, array="torch")
    for case, row in bench.measure(cases):
        name = f"all_reduce {format_size(case.bytes)}"
        yield Bar(f"{name}: wrong elements", row.ours.wrong, most=0)
        (torch,) = row.others or (None,)
        ratio = row.times_as_fast(torch) if torch else None
        yield Bar(f"{name}: against torch's NCCL", _or_nan(ratio), 0.98)
        if case.bytes in _HOST_SIZES:
            host_ratio = row.times_as_fast(torch, "host_us") if torch else None
            yield Bar(f"{name}: the host's time", _or_nan(row.ours.host_us), most=5, unit=" us")
            yield Bar(f"{name}: the host, against torch's", _or_nan(host_ratio), 1 / 0.6)


def others(bench: GpuBench) -> Iterator[Bar]:
    """Every other collective, on a small and on a large array."""
    for collective in COLLECTIVES:
        if collective in ("all_reduce", "barrier"):
            continue
        cases = array_cases(collective, _OTHER_SIZES, _RANKS, array="torch")
        for case, row in bench.measure(cases):
            name = f"{collective} {format_size(case.bytes)}"
            (torch,) = row.others or (None,)
            ratio = row.times_as_fast(torch) if torch else None
            yield Bar(f"{name}: wrong elements", row.ours.wrong, most=0)
            yield Bar(f"{name}: against torch's NCCL", _or_nan(ratio), 0.98)


def gradient_list(bench: GpuBench) -> Iterator[Bar]:
    """ResNet-50's gradients as a list."""
    for _, row in bench.measure((list_case("resnet50", "float32", "sum", "torch"),)):
        (torch,) = row.others or (None,)
        ratio = row.times_as_fast(torch) if torch else None
        yield Bar("161 gradients: wrong elements", row.ours.wrong, most=0)
        yield Bar("161 gradients: against DDP's buckets", _or_nan(ratio), 1.3)


def memory(bench: GpuBench) -> Iterator[Bar]:
    """Device memory of the first calls, and its growth over many calls."""
    launcher = [sys.executable, "-m", "fastdist", "run", "--no-prefix", "-n", str(_RANKS)]
    output = subprocess.run(
        [*launcher, str(_FOLDER / "device_memory.py")],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    ).stdout
    figures = [json.loads(line) for line in output.splitlines()]
    bench.rows += figures
    yield from memory_bars(figures)


def memory_bars(figures: Sequence[dict[str, float]]) -> Iterator[Bar]:
    """Yields the bars for the output of device_memory.py.

    The figures are for the whole GPU, which all ranks share, so that any rank's figures count.
    """
    for figure in ("again", "growth"):
        name = {
            "again": "device memory: lists after the first list",
            "growth": "device memory: growth over 10,000 calls",
        }[figure]
        most = max(rank[f"{figure}_bytes"] for rank in figures) / _MIB
        yield Bar(name, most, most=0, unit=" MiB")


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value


_SECTIONS: dict[str, Callable[[GpuBench], Iterator[Bar]]] = {
    "all_reduce": all_reduce,
    "others": others,
    "list": gradient_list,
    "memory": memory,
}


def main() -> int:
    """Checks the bars; 1 if one was missed, 2 without a GPU."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=tuple(_SECTIONS), default=tuple(_SECTIONS))
    parser.add_argument("--time-s", type=float, default=1.0, help="seconds per case and engine")
    parser.add_argument("--out", type=Path, help="default: results/gpu-bars-<date>.json")
    options = parser.parse_args()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0")
    os.environ["CUDA_VISIBLE_DEVICES"] = visible.partition(",")[0]
    if why := _core.why_no_cuda():
        print(f"no GPU: {why}", file=sys.stderr)
        return 2
    placement = place_ranks(_RANKS)
    print(f"# {placement}")
    bench = GpuBench(placement, options.time_s)
    bars: list[Bar] = []
    for section in options.only:
        bars += printed(with_failure(section, _SECTIONS[section](bench)))
    machine = machine_facts() | gpu_facts()
    out = options.out or _FOLDER.parent / "results" / f"gpu-bars-{machine['date']}.json"
    facts = {"machine": machine, "gpus": str(placement), "engines": bench.engines}
    return write_results(out, facts, bars, bench.rows)


if __name__ == "__main__":
    sys.exit(main())
