"""Collects the sections of the doctor's report; writes text and JSON."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from itertools import zip_longest

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
from fastdist.processes.terminal import broken, show, width_of

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
    width = width_of(sys.stdout)
    colour = width is not None and has_colour()
    show(to_json(sections) if options.json else to_text(sections, colour=colour, width=width))
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


def to_text(sections: Sequence[Section], *, colour: bool, width: int | None = None) -> str:
    """Format aligned lines of at most `width` columns; omit sections without facts."""
    shown = [section for section in sections if section.facts]
    labels = max(len(_label(fact)) for section in shown for fact in section.facts)
    room = None if width is None else width - labels - 4
    lines = []
    for section in shown:
        lines.append(f"{_BOLD}{section.title}{_RESET}" if colour else section.title)
        for fact in section.facts:
            style = _COLOURS[fact.state] if colour else ""
            parts = broken(fact.text, room, indent="")
            for label, part in zip_longest([_label(fact)], parts, fillvalue=""):
                value = f"{style}{part}{_RESET}" if style else part
                lines.append(f"  {label:<{labels}}  {value}")
    return "\n".join(lines) + "\n"


def _label(fact: Fact) -> str:
    return fact.key.replace("_", " ") if fact.label is None else fact.label
