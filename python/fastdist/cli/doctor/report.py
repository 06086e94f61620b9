"""Writes the doctor's report as text and JSON."""

from __future__ import annotations

import argparse
import json
import sys
from itertools import zip_longest

from fastdist.cli.doctor.sections import SECTIONS, Fact
from fastdist.processes.terminal import broken, show, width_of

Sections = dict[str, list[Fact]]  # by title


def run(options: argparse.Namespace) -> int:
    """Print the report; return 1 if a fact is bad."""
    sections = examine()
    show(to_json(sections) if options.json else to_text(sections, width_of(sys.stdout)))
    return 0 if is_well(sections) else 1


def examine() -> Sections:
    """Collect all sections, in less than a second; leave no files or processes behind."""
    return {title: section() for title, section in SECTIONS.items()}


def is_well(sections: Sections) -> bool:
    """Return False if a fact is bad."""
    return not any(fact.is_bad for facts in sections.values() for fact in facts)


def to_json(sections: Sections) -> str:
    """Format one object per section, and `well`, which is false if a fact is bad."""
    report: dict[str, object] = {
        title.replace(" ", "_"): {fact.key: fact.value for fact in facts}
        for title, facts in sections.items()
    }
    report["well"] = is_well(sections)
    return json.dumps(report, indent=2) + "\n"


def to_text(sections: Sections, width: int | None = None) -> str:
    """Format aligned lines of at most `width` columns; omit sections without facts."""
    labels = max(len(_label(fact)) for facts in sections.values() for fact in facts)
    room = None if width is None else width - labels - 4
    lines = []
    for title, facts in sections.items():
        if facts:
            lines.append(title)
        for fact in facts:
            parts = broken(fact.text, room, indent="")
            for label, part in zip_longest([_label(fact)], parts, fillvalue=""):
                lines.append(f"  {label:<{labels}}  {part}")
    return "\n".join(lines) + "\n"


def _label(fact: Fact) -> str:
    return fact.key.replace("_", " ") if fact.label is None else fact.label
