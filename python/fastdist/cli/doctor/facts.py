"""Facts of the doctor's report, as text and as JSON."""

from __future__ import annotations

import enum
from dataclasses import dataclass

JsonValue = str | int | float | bool | None


class State(enum.Enum):
    """The severity of a fact."""

    PLAIN = "plain"
    GOOD = "good"
    ABSENT = "absent"  # missing; everything else works without it
    BAD = "bad"  # keeps collectives from working


@dataclass(frozen=True, slots=True)
class Fact:
    """One line of the report.

    Attributes:
        value: value in JSON; sizes in bytes, times in the unit of the key.
        text: value in the text report.
        state: severity.
        label: name in the text report; the key with spaces for underscores if None.
    """

    key: str
    value: JsonValue
    text: str
    state: State = State.PLAIN
    label: str | None = None


def format_bytes(size_bytes: int) -> str:
    """Format a size in the largest unit in which it is at least 1: "7.5 GiB"."""
    size, unit = float(size_bytes), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024 or unit == "TiB":
            break
        size /= 1024
    return f"{size:.4g} {unit}"
