"""`fastdist bench`: measures collectives, side by side with other libraries."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

from fastdist.cli.bench import cases
from fastdist.cli.bench.peers import CUDA_PEER_NAMES, PEER_NAMES, cache_dir
from fastdist.cli.command import add_command, count, seconds

_DESCRIPTION = """\
Measures a collective between processes on this machine. The columns are those
of nccl-tests: p50 and p99 of the slowest rank's time, algbw = bytes / p50,
busbw = algbw times the collective's bus factor, the number of wrong elements.
floor is the measured speed as a percentage of the memory floor: the speed at
which memory can copy the minimum number of bytes. It is not shown where the
caches hold all buffers, or each rank has a GPU of its own. On GPUs, p50 and p99
are times between two events on the GPU, host is the time until a call returns,
and graph is the time of a replay of a CUDA graph with the call.
"""
_REPORT_DESCRIPTION = """\
Measures every collective on the CPU next to every installed peer, in a few
minutes. Writes an HTML page that needs no other file, and its data as JSON."""
_COMPARE_DESCRIPTION = """\
Says for each case of two reports' JSON files how much slower or faster
fastdist is in the second, with a 95 % confidence interval."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the `bench` command."""
    bench = subparsers.add_parser(
        "bench",
        help="measure collectives, side by side with gloo and MPI, on GPUs with torch's NCCL",
        description="Measures collectives between processes on this machine.",
        allow_abbrev=False,
    )
    commands = bench.add_subparsers(metavar="OP", dest="collective", required=True)
    run = "bench.command:run_command"
    add = partial(add_command, commands, handler=run, errors=(ImportError,), title="fastdist bench")
    options = _options()
    for name in cases.COLLECTIVES:
        add(name, parents=[options], help=f"measure {name}", description=_DESCRIPTION)
    ranks = "number of processes (default: usable cores; at least 2)"
    files = "write FILE.html and FILE.json (default: files with the date in {})"
    every = "measure every collective next to every installed peer, and write a page"
    report = add("report", help=every, description=_REPORT_DESCRIPTION).add_argument
    report("--ranks", "-n", type=count("ranks", least=2), help=ranks)
    report("--out", type=Path, metavar="FILE.html", help=files.format(cache_dir("reports")))
    report("--json", action="store_true", help="also write the JSON to stdout")
    slower = "exit with 1 if a case is slower by more than this at both ends of its interval"
    compare = add_command(
        commands,
        "compare",
        "bench.comparison:run_compare",
        help="say what changed between two reports",
        description=_COMPARE_DESCRIPTION,
    ).add_argument
    compare("old", type=Path, metavar="A.json")
    compare("new", type=Path, metavar="B.json")
    compare("--force", action="store_true", help="compare reports of different machines")
    compare("--json", action="store_true", help="write JSON instead")
    compare("--fail-slower", type=float, metavar="PERCENT", help=slower)


def _options() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(add_help=False)
    add = options.add_argument_group("cases").add_argument
    range_or_list = "a range 8:256M, by factors of 4, or a list 8,1K,64K, in bytes"
    add("--sizes", default="8:64M", metavar="SIZES", help=f"{range_or_list} (default %(default)s)")
    in_one = "instead of sizes: this model's gradients, in one fused all_reduce"
    add("--list", dest="model", choices=cases.GRADIENT_SHAPES, help=in_one)
    ranks = "number of processes (default: usable cores, or GPUs; at least 2)"
    add("--ranks", "-n", type=count("ranks"), help=ranks)
    dtypes = tuple(cases.DTYPE_BYTES)
    add("--dtype", choices=dtypes, default="float32", metavar="TYPE", help=", ".join(dtypes))
    add("--op", dest="redop", choices=cases.REDUCE_OPS, default="sum", help="reduce op")
    device = "device of the arrays (default: cpu); with fewer GPUs than ranks, ranks share GPUs"
    add("--device", choices=tuple(cases.DEVICE_ARRAYS), default="cpu", help=device)
    empty = "empty: comm.empty, which needs no copy"
    arrays = f"arrays for fastdist's calls (default: numpy, on GPUs torch); {empty}"
    add("--array", choices=cases.DEVICE_ARRAYS["cpu"], help=arrays)
    add = options.add_argument_group("effort").add_argument
    iters = "timed calls per case (default: as many as fit in --time-s)"
    add("--iters", type=count("calls"), help=iters)
    add("--time-s", type=seconds, default=1.0, help="seconds per case and engine (default 1)")
    add = options.add_argument_group("peers and output").add_argument
    peers = f"{','.join(PEER_NAMES)}; mpi: every MPI; on GPUs: {','.join(CUDA_PEER_NAMES)}"
    add("--vs", metavar="PEERS", default="", help=f"peers to measure side by side: {peers}")
    through = "call fastdist as the backend of torch.distributed, as DDP and FSDP do"
    add("--through", choices=("torch",), help=through)
    add("--json", metavar="FILE", help="write JSON; -: JSON to stdout, the table to stderr")
    plot = "draw latency and bandwidth over several sizes into a file, such as plot.png"
    add("--plot", metavar="FILE", help=plot)
    return options
