"""`fastdist doctor`: shows the build, the machine and missing libraries."""

from __future__ import annotations

import argparse
import os
import sys


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the `doctor` command."""
    parser = subparsers.add_parser(
        "doctor",
        help="show the build, the machine and missing libraries",
        description="Shows the build, the machine's resources and limits, the engine for each kind "
        "of array, libraries to install, and the result of a collective. Exits with 1 if "
        "collectives do not work.",
        allow_abbrev=False,
    )
    parser.add_argument("--json", action="store_true", help="write JSON instead")
    parser.set_defaults(handler=_doctor)


def _doctor(options: argparse.Namespace) -> int:
    from fastdist.cli.doctor.report import examine, to_json, to_text  # numpy: only when it runs

    sections = examine()
    colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    colour = colour and os.environ.get("TERM") != "dumb"
    sys.stdout.write(to_json(sections) if options.json else to_text(sections, colour=colour))
    return 0 if all(section.is_well for section in sections) else 1
