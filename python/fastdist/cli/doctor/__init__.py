"""`fastdist doctor`: shows the build, the machine and missing libraries."""

from __future__ import annotations

import argparse

from fastdist.cli.command import add_command


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the `doctor` command."""
    parser = add_command(
        subparsers,
        "doctor",
        "doctor.report:run",
        help="show the build, the machine and missing libraries",
        description="Shows the build, the machine's resources and limits, the engine for each\n"
        "kind of array, libraries to install, and the result of a collective. Exits\n"
        "with 1 if collectives do not work.",
    )
    parser.add_argument("--json", action="store_true", help="write JSON instead")
