"""`fastdist bench OP`: measures a collective, side by side with other libraries."""

from __future__ import annotations

import argparse
from pathlib import Path

from fastdist.cli.bench.cases import ARRAYS, DEVICE_ARRAYS, DTYPE_BYTES, REDUCE_OPS
from fastdist.cli.bench.collectives import COLLECTIVES
from fastdist.cli.bench.models import MODEL_NAMES
from fastdist.cli.bench.peers import CUDA_PEER_NAMES, PEER_NAMES, default_peers_dir

_DESCRIPTION = """\
Measures a collective between processes on this machine. The columns are those of nccl-tests:
p50 and p99 of the slowest rank's time, algbw = bytes / p50, busbw = algbw times the
collective's bus factor, the number of wrong elements. floor is the measured speed as a
percentage of the memory floor: the speed at which memory can copy the minimum number of bytes.
It is not shown where the caches hold all buffers. On GPUs, p50 and p99 are times between two
events on the GPU, host is the time until a call returns, and graph is the time of a replay of
a CUDA graph with the call; where each rank has a GPU of its own, floor is a percentage of the
speed of the links between GPUs.
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
        choices=tuple(COLLECTIVES),
        help=", ".join(COLLECTIVES),
    )
    what = parser.add_argument_group("cases")
    what.add_argument(
        "--sizes",
        default="8:64M",
        metavar="SIZES",
        help="a range 8:256M or a list 8,1K,64K, in bytes (default %(default)s)",
    )
    what.add_argument(
        "--factor", type=int, default=4, help="ratio of successive sizes of a range (default 4)"
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
    what.add_argument("--dtype", choices=tuple(DTYPE_BYTES), default="float32")
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
    _add_effort(parser.add_argument_group("effort"))
    _add_output(parser)
    parser.set_defaults(handler=_bench)


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
    group.add_argument(
        "--bind",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="bind each rank to a core of its own, if there are enough cores",
    )
    group.add_argument(
        "--graph",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="on GPUs: also replay a CUDA graph that holds the call",
    )
    group.add_argument(
        "--timeout-s",
        type=float,
        default=300.0,
        help="seconds to wait for an engine",
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
    group.add_argument(
        "--peers-dir",
        type=Path,
        default=default_peers_dir(),
        help="folder with a folder for each MPI (default %(default)s)",
    )
    group.add_argument(
        "--json",
        metavar="FILE",
        help="write JSON; -: JSON to stdout, the table to stderr",
    )
    group.add_argument("--csv", metavar="FILE", help="write CSV to a file")
    group.add_argument(
        "--plot", metavar="FILE", help="draw latency and bandwidth into a file, such as plot.png"
    )


def _bench(options: argparse.Namespace) -> int:
    from fastdist.cli.bench.command import run_command  # imports numpy

    return run_command(options)
