"""`fastdist bench OP`: how fast a collective is here, next to what else there is."""

from __future__ import annotations

import argparse
from pathlib import Path

from fastdist.cli.bench.cases import ARRAYS, DEVICE_ARRAYS, DTYPE_BYTES, REDUCE_OPS
from fastdist.cli.bench.collectives import COLLECTIVES
from fastdist.cli.bench.models import MODEL_NAMES
from fastdist.cli.bench.peers import CUDA_PEER_NAMES, PEER_NAMES, default_peers_dir

PACK = "pack"

_DESCRIPTION = """\
Measures a collective between processes on this machine. Columns are those of nccl-tests:
p50 and p99 of the slowest rank's time, algbw = bytes / p50, busbw = algbw times the
collective's bus factor, the number of wrong elements, and the share of the memory floor,
which is the speed that copying the least possible bytes would have here. On GPUs p50 and p99
are the time between two events on the GPU, host is the time until a call returns, graph that
of a replay of a CUDA graph with the call; where each rank has a GPU of its own, floor is the
share of the speed of what connects them.
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the `bench` command."""
    parser = subparsers.add_parser(
        "bench",
        help="measure a collective, side by side with gloo and MPI, on GPUs with torch's NCCL",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "collective",
        metavar="OP",
        choices=(*COLLECTIVES, PACK),
        help=f"{', '.join(COLLECTIVES)}; or {PACK}: lists into buckets and out again, on a GPU",
    )
    what = parser.add_argument_group("what is measured")
    what.add_argument(
        "--sizes",
        default="8:64M",
        metavar="SIZES",
        help="a range 8:256M or a list 8,1K,64K, in bytes (default %(default)s)",
    )
    what.add_argument(
        "--factor", type=int, default=4, help="from one size of a range to the next (default 4)"
    )
    what.add_argument(
        "--list",
        dest="model",
        choices=MODEL_NAMES,
        help="instead of sizes: one fused all_reduce of this model's gradients; or what pack packs",
    )
    what.add_argument(
        "--ranks",
        "-n",
        type=int,
        help="processes (default: usable cores, or GPUs; at least 2)",
    )
    what.add_argument("--dtype", choices=tuple(DTYPE_BYTES), default="float32")
    what.add_argument("--op", dest="redop", choices=REDUCE_OPS, default="sum", help="reduce op")
    what.add_argument(
        "--device",
        choices=tuple(DEVICE_ARRAYS),
        help="where arrays lie (default: cpu); ranks share GPUs where there are fewer of them",
    )
    what.add_argument(
        "--array",
        choices=ARRAYS,
        help="what fastdist is called with (default: numpy, on GPUs torch); empty: comm.empty, "
        "which needs no copy",
    )
    _add_effort(parser.add_argument_group("how much"))
    _add_output(parser)
    parser.set_defaults(handler=_bench)


def _add_effort(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--iters", type=int, help="timed calls per case (default: as --time-s allows)"
    )
    group.add_argument("--warmup", type=int, default=5, help="calls before that (default 5)")
    group.add_argument(
        "--time-s", type=float, default=1.0, help="seconds per case and engine (default 1)"
    )
    group.add_argument(
        "--check",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="verify the results, outside of the timed calls",
    )
    group.add_argument(
        "--bind",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="keep each rank on a core of its own, where there are enough",
    )
    group.add_argument(
        "--graph",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="on GPUs: also replay a CUDA graph that holds the call",
    )
    group.add_argument(
        "--timeout-s", type=float, default=300.0, help="an engine silent for so long has failed"
    )


def _add_output(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("peers and output")
    group.add_argument(
        "--vs",
        metavar="PEERS",
        default="",
        help=f"engines to measure side by side, out of {','.join(PEER_NAMES)}; mpi: every MPI; "
        f"on GPUs out of {','.join(CUDA_PEER_NAMES)}",
    )
    group.add_argument(
        "--peers-dir",
        type=Path,
        default=default_peers_dir(),
        help="where MPIs are installed, each in a folder of its own (default %(default)s)",
    )
    group.add_argument(
        "--json", metavar="FILE", help="write JSON; - writes it to stdout, the table to stderr"
    )
    group.add_argument("--csv", metavar="FILE", help="write CSV")
    group.add_argument(
        "--plot", metavar="FILE", help="draw latency and bandwidth, e.g. into plot.png"
    )


def _bench(options: argparse.Namespace) -> int:
    # numpy and more: only when it runs
    if options.collective == PACK:
        from fastdist.cli.bench.pack_command import run_pack

        return run_pack(options)
    from fastdist.cli.bench.command import run_command

    options.device = options.device or "cpu"
    return run_command(options)
