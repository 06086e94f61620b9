"""Collects the sections of the doctor's report; writes text and JSON."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from fastdist.cli.command import has_colour
from fastdist.cli.doctor.engines import arrays_section, check_section, engines_section
from fastdist.cli.doctor.facts import Fact, Section, State
from fastdist.cli.doctor.libraries import (
    build_section,
    gpus_section,
    install_section,
    launcher_section,
    libraries_section,
)
from fastdist.cli.doctor.machine import machine_section, memory_section

_RESET = "\033[0m"
_BOLD = "\033[1m"
_COLOURS = {
    State.PLAIN: "",
    State.GOOD: "\033[32m",
    State.ABSENT: "\033[2m",
    State.BAD: "\033[31m",
}


def run(options: argparse.Namespace) -> int:
    """Print the report; return 1 if a fact is bad."""
    sections = examine()
    colour = sys.stdout.isatty() and has_colour()
    sys.stdout.write(to_json(sections) if options.json else to_text(sections, colour=colour))
    return 0 if all(section.is_well for section in sections) else 1


def examine() -> list[Section]:
    """Collect all sections, in less than a second; leave no files or processes behind."""
    return [
        build_section(),
        machine_section(),
        memory_section(),
        gpus_section(),
        libraries_section(),
        launcher_section(),
        engines_section(),
        arrays_section(),
        check_section(),
        install_section(),
    ]


def to_json(sections: Sequence[Section]) -> str:
    """Format one object per section, and `well`, which is false if a fact is bad."""
    report: dict[str, object] = {
        section.title.replace(" ", "_"): {fact.key: fact.value for fact in section.facts}
        for section in sections
    }
    report["well"] = all(section.is_well for section in sections)
    return json.dumps(report, indent=2) + "\n"


def to_text(sections: Sequence[Section], *, colour: bool) -> str:
    """Format aligned lines under titles; omit sections without facts."""
    shown = [section for section in sections if section.facts]
    width = max(len(_label(fact)) for section in shown for fact in section.facts)
    lines = []
    for section in shown:
        lines.append(f"{_BOLD}{section.title}{_RESET}" if colour else section.title)
        for fact in section.facts:
            style = _COLOURS[fact.state] if colour else ""
            value = f"{style}{fact.text}{_RESET}" if style else fact.text
            lines.append(f"  {_label(fact):<{width}}  {value}")
    return "\n".join(lines) + "\n"


def _label(fact: Fact) -> str:
    return fact.key.replace("_", " ") if fact.label is None else fact.label
