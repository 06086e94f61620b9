"""`fastdist why`: says in one sentence why a job stands still."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

_DESCRIPTION = """\
Says why a job stands still: which rank is the cause, what it does, and where. Asks no rank: it
reads the records that every rank keeps in memory, what the kernel tells of processes, and Python's
stacks (by py-spy where that is installed). It works on ranks that are stopped, dead or stuck in C.
"""
_EPILOG = """\
examples:
  fastdist why                      # the youngest job of yours on this machine
  fastdist why 4f1c                 # the job whose id begins so; fastdist ps lists them
  fastdist why 31337                # the job of this process
  fastdist why --plot arrivals.png  # also draw when each rank came to the last collectives
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the `why` command."""
    parser = subparsers.add_parser(
        "why",
        help="say why a job stands still",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
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
    parser.set_defaults(handler=_why)


def _why(options: argparse.Namespace) -> int:
    from fastdist.cli.why.report import run  # numpy: only when it runs

    try:
        run(options.job, as_json=options.json, plot=options.plot)
    except (LookupError, ImportError, OSError, ValueError) as error:
        print(f"fastdist why: {error}", file=sys.stderr)
        return 2
    return 0
