"""`fastdist doctor`: shows the build, the machine and missing libraries."""

from __future__ import annotations

import argparse
import os
import sys


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the `doctor` command."""
    parser = subparsers.add_parser(
        "doctor",
        help="show the build, the machine and missing libraries",
        description="Shows the build, the machine's resources and limits, the engine for each kind "
        "of array, libraries to install, and the result of a collective. Exits with 1 if "
        "collectives do not work.",
        allow_abbrev=False,
    )
    parser.add_argument("--json", action="store_true", help="write JSON instead")
    parser.add_argument(
        "--explain",
        nargs=2,
        metavar=("COLLECTIVE", "SIZE"),
        help="show which way a call would take between the ranks of this job, such as "
        "`fastdist run -n 4 -m fastdist doctor --explain all_reduce 4M`, why, and its predicted "
        "and measured time",
    )
    parser.set_defaults(handler=_doctor)


def _doctor(options: argparse.Namespace) -> int:
    from fastdist.cli.doctor.report import examine, to_json, to_text  # numpy: only when it runs

    if options.explain:
        from fastdist.cli.doctor.explain import explain

        try:
            section = explain(*options.explain)
        except ValueError as error:
            print(f"fastdist doctor: {error}", file=sys.stderr)
            return 2
        sections = [] if section is None else [section]
        if not sections:
            return 0
    else:
        sections = examine()
    colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    colour = colour and os.environ.get("TERM") != "dumb"
    sys.stdout.write(to_json(sections) if options.json else to_text(sections, colour=colour))
    return 0 if all(section.is_well for section in sections) else 1
