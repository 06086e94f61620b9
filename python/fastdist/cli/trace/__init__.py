"""`fastdist trace`: says where the time of a traced job went, and who waited for whom."""

import argparse
from pathlib import Path

from fastdist.cli.command import add_command

_DESCRIPTION = """\
Reads traces that `fastdist run --trace` wrote: prints how long steps took,
what ranks did meanwhile, and which ranks the others waited for, and why. The
seconds of a phase include those spent waiting in it. Perfetto
(https://ui.perfetto.dev) and chrome://tracing show the same files. Traces of a
job's machines are joined on the clock of the first: all ranks of a collective
see at the same moment that the last of them has come.
"""
_EPILOG = """\
examples:
  fastdist run -n 4 --trace out.json train.py
  fastdist trace out.json
  fastdist trace out.json --plot steps.png          # draw the time of each step
  fastdist trace node0.json node1.json -o all.json  # join two machines' traces
"""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the `trace` command."""
    parser = add_command(
        subparsers,
        "trace",
        "trace.report:run",
        (ImportError, OSError, ValueError),
        help="say where the time of a traced job went",
        description=_DESCRIPTION,
        epilog=_EPILOG,
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="a machine's trace")
    parser.add_argument("--json", action="store_true", help="write JSON instead")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw the time of each step, by rank, into a file"
    )
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="write one trace of all machines"
    )
