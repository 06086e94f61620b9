"""Runs `fastdist bench compare`: what changed between two reports, case by case."""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastdist.cli.bench.cases import Case
from fastdist.cli.bench.intervals import SAMPLES, Interval, median_interval, ratio_interval
from fastdist.cli.command import UsageError
from fastdist.processes.terminal import fitted, show

_FAILED = 1
_MACHINE = ("processor", "cores", "cache", "memory")
_CHANCE = 0.05


class RecordedRun:
    """The JSON of a report."""

    def __init__(self, name: str, recorded: Mapping[str, Any]) -> None:
        self.name = name
        self.when = str(recorded["when"])  # in ISO 8601
        self.version = f"fastdist {recorded['fastdist']}"
        self.machine: dict[str, str] = {key: recorded["machine"][key] for key in _MACHINE}
        self.engines: dict[str, str] = dict(recorded["engines"])
        self.ranks = int(recorded["ranks"])
        self.samples: dict[Case, dict[str, list[float]]] = {}  # of each engine
        for row in recorded["rows"]:
            case = Case(**{name: row[name] for name in Case.__slots__})
            self.samples[case] = {
                engine: _samples(figures)
                for engine, figures in {"fastdist": row, **row["peers"]}.items()
                if "unsupported" not in figures
            }

    @classmethod
    def read(cls, path: Path) -> RecordedRun:
        """Read a file."""
        try:
            return cls(str(path), json.loads(path.read_text()))
        except (OSError, KeyError, TypeError, ValueError) as error:
            raise UsageError(
                f"{path} is not a JSON file of `fastdist bench report`: {error!r}"
            ) from None

    def other_machine(self, other: RecordedRun) -> str:
        """Return how the machines differ; nothing if they are the same or of the same kind."""
        return ", ".join(
            f"{name} {self.machine[name]} and {other.machine[name]}"
            for name in _MACHINE
            if self.machine[name] != other.machine[name]
        )


def _samples(figures: Mapping[str, Any]) -> list[float]:
    samples = [float(us) for us in figures["samples_us"]]
    if len(samples) != SAMPLES:
        raise ValueError(f"expected {SAMPLES} samples, got {len(samples)}")
    if not all(0 < us < math.inf for us in samples):
        raise ValueError(f"expected samples above 0, got {samples}")
    return samples


@dataclass(frozen=True, slots=True)
class Change:
    """The change of one case."""

    case: Case
    percent: Interval  # of the old time
    unstable: bool  # True if the time is unstable in either run

    @property
    def is_slower(self) -> bool:
        """True if the whole interval is above 0."""
        return self.percent.low > 0

    @property
    def is_faster(self) -> bool:
        """True if the whole interval is below 0."""
        return self.percent.high < 0

    def __str__(self) -> str:
        estimate, low, high = self.percent.estimate, self.percent.low, self.percent.high
        if self.is_slower:
            found = f"{estimate:.0f} % slower, 95 %: {low:.0f} to {high:.0f}"
        elif self.is_faster:
            found = f"{-estimate:.0f} % faster, 95 %: {-high:.0f} to {-low:.0f}"
        else:
            found = f"no change found, 95 %: {-low:.0f} % faster to {high:.0f} % slower"
        return f"{self.case.title}: {found}{' (unstable)' if self.unstable else ''}"


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two runs and the changes from `old` to `new`."""

    old: RecordedRun
    new: RecordedRun
    changes: tuple[Change, ...]

    def control(self) -> Iterator[tuple[str, float]]:
        """Yield peers of the same version in both runs, and how the machine changed their time."""
        for name, version in self.old.engines.items():
            if name == "fastdist" or self.new.engines.get(name) != version:
                continue
            pairs = [(self.old.samples[c.case], self.new.samples[c.case]) for c in self.changes]
            factors = [
                statistics.median(new[name]) / statistics.median(old[name])
                for old, new in pairs
                if name in old and name in new
            ]
            if factors:
                yield name, statistics.median(factors)

    def lines(self) -> list[str]:
        """Return the lines for a terminal: both runs, a line per case, the control."""
        ends = (("from", self.old), ("to", self.new))
        lines = [f"{word} {run.version}, {run.when} ({run.name})" for word, run in ends]
        if differences := self.old.other_machine(self.new):
            lines.append(f"warning: other machine: {differences}")
        return [*lines, *map(str, self.changes), *self.notes()]

    def notes(self) -> Iterator[str]:
        """Yield what to keep in mind about the changes."""
        for run, other in ((self.old, self.new), (self.new, self.old)):
            if alone := [case.title for case in run.samples if case not in other.samples]:
                more = f", and {len(alone) - 3} more" if len(alone) > 3 else ""
                yield f"only in {run.name}: {', '.join(alone[:3])}{more}"
        if control := [f"{name} {100 * (x - 1):+.0f} %" for name, x in self.control()]:
            yield f"the time of peers, which are the same programs: {', '.join(control)}"
        yield (
            f"without any change, chance alone would call up to {_CHANCE * len(self.changes):.1f} "
            f"of {len(self.changes)} cases faster or slower, on average"
        )

    def to_json(self) -> dict[str, Any]:
        """Convert the comparison for JSON."""
        old, new = (
            {"file": run.name, "version": run.version, "when": run.when}
            for run in (self.old, self.new)
        )
        return {
            "old": old,
            "new": new,
            "other_machine": self.old.other_machine(self.new),
            "control": {name: round(factor, 4) for name, factor in self.control()},
            "changes": [
                {
                    "case": change.case.title,
                    "percent": round(change.percent.estimate, 2),
                    "low": round(change.percent.low, 2),
                    "high": round(change.percent.high, 2),
                    "unstable": change.unstable,
                    "word": str(change),
                }
                for change in self.changes
            ],
        }


def compare(old: RecordedRun, new: RecordedRun) -> Comparison:
    """Compare fastdist's time in every case that both runs have."""
    changes = []
    for case in old.samples:
        if case in new.samples:
            samples = [run.samples[case]["fastdist"] for run in (old, new)]
            factor = ratio_interval(*samples)
            percents = (100 * (x - 1) for x in (factor.estimate, factor.low, factor.high))
            unstable = any(median_interval(times).is_unstable for times in samples)
            changes.append(Change(case, Interval(*percents), unstable))
    return Comparison(old, new, tuple(changes))


def run_compare(options: argparse.Namespace) -> int:
    """Compare two files; return 1 if a case is slower than `--fail-slower` allows."""
    old, new = RecordedRun.read(options.old), RecordedRun.read(options.new)
    if (differences := old.other_machine(new)) and not options.force:
        raise UsageError(
            f"{old.name} and {new.name} are from different machines, whose times cannot tell what "
            f"changed in fastdist: {differences}; --force compares them nevertheless"
        )
    if old.ranks != new.ranks:
        raise UsageError(
            f"{old.name} has {old.ranks} ranks and {new.name} has {new.ranks}; expected the same"
        )
    comparison = compare(old, new)
    if not comparison.changes:
        raise UsageError(f"{old.name} and {new.name} have no case in common")
    if options.json:
        show(json.dumps(comparison.to_json(), indent=1) + "\n")
    else:
        show(fitted("\n".join(comparison.lines()) + "\n", sys.stdout))
    if options.fail_slower is None:
        return 0
    limit = max(0.0, options.fail_slower)
    return _FAILED if any(change.percent.low > limit for change in comparison.changes) else 0
