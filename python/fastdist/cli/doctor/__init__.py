"""`fastdist doctor`: what is built in here, what the machine gives, and what is missing."""

from __future__ import annotations

import argparse
import os
import sys


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the `doctor` command."""
    parser = subparsers.add_parser(
        "doctor",
        help="show what is built in, what this machine gives, and what is missing",
        description="Shows what is built in, what this machine gives, which engine serves which "
        "arrays, what could be installed, and whether a collective works. Exits with 1 when "
        "something keeps collectives from working.",
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
