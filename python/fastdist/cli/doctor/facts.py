"""What the doctor finds out: facts, in sections, for people and for programs."""

from __future__ import annotations

import enum
from dataclasses import dataclass

JsonValue = str | int | float | bool | None


class State(enum.Enum):
    """What a fact means for whoever reads it."""

    PLAIN = "plain"
    GOOD = "good"
    ABSENT = "absent"  # not there, and everything else works without it
    BAD = "bad"  # keeps collectives from working


@dataclass(frozen=True, slots=True)
class Fact:
    """One line of the report.

    Attributes:
        key: its name in JSON.
        value: for programs; sizes in bytes, times as the key says.
        text: for people.
        state: what it means.
        label: its name for people; the key with spaces for underscores if None.
    """

    key: str
    value: JsonValue
    text: str
    state: State = State.PLAIN
    label: str | None = None


@dataclass(frozen=True, slots=True)
class Section:
    """Facts under a title."""

    title: str
    facts: tuple[Fact, ...]

    @property
    def is_well(self) -> bool:
        """False where a fact is bad."""
        return all(fact.state is not State.BAD for fact in self.facts)


def format_bytes(size_bytes: int) -> str:
    """A size in the largest unit that leaves a figure of at least 1: "7.5 GiB"."""
    size, unit = float(size_bytes), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024 or unit == "TiB":
            break
        size /= 1024
    return f"{size:.4g} {unit}"
