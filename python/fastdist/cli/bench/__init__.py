"""`fastdist bench`: measures collectives, side by side with other libraries."""

from __future__ import annotations

import argparse
from pathlib import Path

from fastdist.cli.bench.cases import ARRAYS, DEVICE_ARRAYS, DTYPE_BYTES, REDUCE_OPS
from fastdist.cli.bench.collectives import COLLECTIVES
from fastdist.cli.bench.models import MODEL_NAMES
from fastdist.cli.bench.peers import (
    CUDA_PEER_NAMES,
    PEER_NAMES,
    cache_dir,
)
from fastdist.cli.command import add_command

_DESCRIPTION = """\
Measures a collective between processes on this machine. The columns are those
of nccl-tests: p50 and p99 of the slowest rank's time, algbw = bytes / p50,
busbw = algbw times the collective's bus factor, the number of wrong elements.
floor is the measured speed as a percentage of the memory floor: the speed at
which memory can copy the minimum number of bytes. It is not shown where the
caches hold all buffers. On GPUs, p50 and p99 are times between two events on
the GPU, host is the time until a call returns, and graph is the time of a
replay of a CUDA graph with the call; where each rank has a GPU of its own,
floor is a percentage of the speed of the links between GPUs.
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the `bench` command."""
    bench = subparsers.add_parser(
        "bench",
        help="measure collectives, side by side with gloo and MPI, on GPUs with torch's NCCL",
        description="Measures collectives between processes on this machine.",
        allow_abbrev=False,
    )
    commands = bench.add_subparsers(metavar="OP", dest="collective", required=True)
    options = argparse.ArgumentParser(add_help=False)
    _add_cases(options)
    _add_effort(options.add_argument_group("effort"))
    _add_output(options)
    for name in COLLECTIVES:
        add_command(
            commands,
            name,
            "bench.command:run_command",
            title="fastdist bench",
            parents=[options],
            help=f"measure {name}",
            description=_DESCRIPTION,
        )
    _add_report(commands)
    _add_compare(commands)


def _add_cases(parser: argparse.ArgumentParser) -> None:
    what = parser.add_argument_group("cases")
    what.add_argument(
        "--sizes",
        default="8:64M",
        metavar="SIZES",
        help="a range 8:256M, by factors of 4, or a list 8,1K,64K, in bytes (default %(default)s)",
    )
    what.add_argument(
        "--list",
        dest="model",
        choices=MODEL_NAMES,
        help="instead of sizes: this model's gradients, in one fused all_reduce",
    )
    what.add_argument(
        "--ranks",
        "-n",
        type=int,
        help="number of processes (default: usable cores, or GPUs; at least 2)",
    )
    what.add_argument(
        "--dtype",
        choices=tuple(DTYPE_BYTES),
        default="float32",
        metavar="TYPE",
        help=", ".join(DTYPE_BYTES),
    )
    what.add_argument("--op", dest="redop", choices=REDUCE_OPS, default="sum", help="reduce op")
    what.add_argument(
        "--device",
        choices=tuple(DEVICE_ARRAYS),
        default="cpu",
        help="device of the arrays (default: cpu); with fewer GPUs than ranks, ranks share GPUs",
    )
    what.add_argument(
        "--array",
        choices=ARRAYS,
        help="arrays for fastdist's calls (default: numpy, on GPUs torch); empty: comm.empty, "
        "which needs no copy",
    )


def _add_report(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = add_command(
        commands,
        "report",
        "bench.full_report:run_report",
        help="measure every collective next to every installed peer, and write a page",
        description="Measures every collective on the CPU next to every installed peer, at its\n"
        "defaults and at its best, in a few minutes. Writes an HTML page that needs no\n"
        "other file, and its data as JSON, and says what changed since the last run on\n"
        "this machine.",
    )
    parser.add_argument(
        "--ranks", "-n", type=int, help="number of processes (default: usable cores; at least 2)"
    )
    _add_peers_dir(parser)
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE.html",
        help="write FILE.html and FILE.json, and compare with the last report in their folder "
        f"(default: a file with the date in {cache_dir('reports')})",
    )
    parser.add_argument("--json", action="store_true", help="also write the JSON to stdout")


def _add_compare(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = add_command(
        commands,
        "compare",
        "bench.comparison:run_compare",
        help="say what changed between two reports",
        description="Says for each case of two reports' JSON files how much slower or faster\n"
        "fastdist is in the second, with a 95 % confidence interval.",
    )
    parser.add_argument("old", type=Path, metavar="A.json")
    parser.add_argument("new", type=Path, metavar="B.json")
    parser.add_argument(
        "--force", action="store_true", help="compare reports of different machines"
    )
    parser.add_argument("--json", action="store_true", help="write JSON instead")
    parser.add_argument(
        "--fail-slower",
        type=float,
        metavar="PERCENT",
        help="exit with 1 if a case is slower by more than this at both ends of its interval",
    )


def _add_peers_dir(group: argparse._ActionsContainer) -> None:
    group.add_argument(
        "--peers-dir",
        type=Path,
        default=cache_dir("peers"),
        help="folder with a folder for each MPI (default %(default)s)",
    )


def _add_effort(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--iters", type=int, help="timed calls per case (default: as many as fit in --time-s)"
    )
    group.add_argument(
        "--warmup", type=int, default=5, help="calls before the timed calls (default 5)"
    )
    group.add_argument(
        "--time-s", type=float, default=1.0, help="seconds per case and engine (default 1)"
    )
    group.add_argument(
        "--check",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="verify the results, outside of the timed calls",
    )


def _add_output(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("peers and output")
    group.add_argument(
        "--vs",
        metavar="PEERS",
        default="",
        help=f"peers to measure side by side: {','.join(PEER_NAMES)}; mpi: every MPI; on GPUs: "
        f"{','.join(CUDA_PEER_NAMES)}",
    )
    group.add_argument(
        "--through",
        choices=("torch",),
        help="call fastdist as the backend of torch.distributed, as DDP and FSDP do",
    )
    _add_peers_dir(group)
    group.add_argument(
        "--json",
        metavar="FILE",
        help="write JSON; -: JSON to stdout, the table to stderr",
    )
    group.add_argument(
        "--plot", metavar="FILE", help="draw latency and bandwidth into a file, such as plot.png"
    )
