"""`fastdist why`: says in one sentence why a job stands still."""

from __future__ import annotations

import argparse
from pathlib import Path

from fastdist.cli.command import add_command

_DESCRIPTION = """\
Says why a job stands still: which rank is the cause, what it does, and where.
Asks no rank: it reads the records that every rank keeps in memory, what the
kernel tells of processes, and Python's stacks (by py-spy where that is
installed). It works on ranks that are stopped, dead or stuck in C.
"""
_EPILOG = """\
examples:
  fastdist why                      # the youngest job of yours on this machine
  fastdist why 4f1c                 # the job whose id begins so, of fastdist ps
  fastdist why 31337                # the job of this process
  fastdist why --plot arrivals.png  # also draw when each rank came
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the `why` command."""
    parser = add_command(
        subparsers,
        "why",
        "why.report:run",
        (ImportError, LookupError, OSError, ValueError),
        help="say why a job stands still",
        description=_DESCRIPTION,
        epilog=_EPILOG,
    )
    parser.add_argument(
        "job",
        nargs="?",
        metavar="JOB|PID",
        help="the beginning of a job's id, or the process of a rank (default: the youngest job)",
    )
    parser.add_argument("--json", action="store_true", help="write JSON instead")
    parser.add_argument(
        "--plot",
        type=Path,
        metavar="FILE",
        help="draw when each rank came to the last collectives into a file.png or file.html; "
        "-: into the terminal",
    )
