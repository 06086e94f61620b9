"""Runs `fastdist bench compare`: what changed between two reports, case by case."""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from fastdist.cli.bench.cases import Case
from fastdist.cli.bench.intervals import (
    LEAST_SAMPLES,
    Interval,
    median_interval,
    ratio_interval,
)
from fastdist.cli.command import UsageError
from fastdist.processes.terminal import fitted, show

_FAILED = 1
_MACHINE = ("processor", "cores", "cache", "memory")
_CHANCE = 0.05


class RunFileError(UsageError):
    """A file cannot be compared."""


class RecordedRun:
    """The JSON of a report.

    Attributes:
        name: File name.
        when: Date and time, in ISO 8601.
        cases: fastdist's samples of each case.
        peers: Samples of each other engine of each case.
    """

    def __init__(self, name: str, recorded: Mapping[str, Any]) -> None:
        self.name = name
        self.when = str(recorded["when"])
        self.version = f"fastdist {recorded['fastdist']}"
        self.machine: dict[str, str] = {key: recorded["machine"][key] for key in _MACHINE}
        self.engines: dict[str, str] = dict(recorded["engines"])
        self.ranks = int(recorded["ranks"])
        self.cases: dict[Case, list[float]] = {}
        self.peers: dict[Case, dict[str, list[float]]] = {}
        for row in recorded["rows"]:
            case = Case(**{field.name: row[field.name] for field in fields(Case)})
            self.cases[case] = _samples(row)
            self.peers[case] = {
                engine: _samples(figures)
                for engine, figures in row["peers"].items()
                if "unsupported" not in figures
            }

    @classmethod
    def read(cls, path: Path) -> RecordedRun:
        """Read a file.

        Raises:
            RunFileError: The file is not the JSON of a report.
        """
        try:
            recorded = json.loads(path.read_text())
        except OSError as error:
            raise RunFileError(f"cannot read {path}: {error.strerror}") from None
        except ValueError as error:
            raise RunFileError(f"{path} is not JSON: {error}") from None
        try:
            return cls(str(path), recorded)
        except (KeyError, TypeError, ValueError) as error:
            raise RunFileError(
                f"{path} is not the JSON file of `fastdist bench report`: "
                f"{'no ' if isinstance(error, KeyError) else ''}{error}"
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
    if len(samples) < LEAST_SAMPLES:
        raise ValueError(f"expected at least {LEAST_SAMPLES} samples, got {len(samples)}")
    if not all(0 < us < math.inf for us in samples):
        raise ValueError(f"expected samples above 0, got {samples}")
    return samples


@dataclass(frozen=True, slots=True)
class Change:
    """The change of one case.

    Attributes:
        factor: The new time divided by the old time.
        unstable: True if the time is unstable in either run.
    """

    case: Case
    factor: Interval
    unstable: bool

    @property
    def is_slower(self) -> bool:
        """True if the whole interval is above 1."""
        return self.factor.low > 1

    @property
    def is_faster(self) -> bool:
        """True if the whole interval is below 1."""
        return self.factor.high < 1

    def __str__(self) -> str:
        estimate, low, high = self.percentages()
        if self.is_slower:
            found = f"{estimate:.0f} % slower, 95 %: {low:.0f} to {high:.0f}"
        elif self.is_faster:
            found = f"{-estimate:.0f} % faster, 95 %: {-high:.0f} to {-low:.0f}"
        else:
            found = f"no change found, 95 %: {-low:.0f} % faster to {high:.0f} % slower"
        return f"{self.case.title}: {found}{' (unstable)' if self.unstable else ''}"

    def percentages(self) -> tuple[float, float, float]:
        """Return estimate, low and high of the change in percent of the old time."""
        factor = self.factor
        estimate, low, high = (100 * (x - 1) for x in (factor.estimate, factor.low, factor.high))
        return estimate, low, high


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two runs and the changes from `old` to `new`."""

    old: RecordedRun
    new: RecordedRun
    changes: tuple[Change, ...]

    def control(self) -> Iterator[tuple[str, float]]:
        """Yield each engine of the same version in both runs, and its median factor.

        These engines are the same programs: what changed them is the machine.
        """
        for name, version in self.old.engines.items():
            if name == "fastdist" or self.new.engines.get(name) != version:
                continue
            factors = [
                statistics.median(self.new.peers[change.case][name])
                / statistics.median(self.old.peers[change.case][name])
                for change in self.changes
                if all(name in run.peers[change.case] for run in (self.old, self.new))
            ]
            if factors:
                yield name, statistics.median(factors)

    def lines(self) -> list[str]:
        """Return the lines for a terminal: both runs, a line per case, the control."""
        old, new = self.old, self.new
        ends = (("from", old), ("to", new))
        lines = [f"{word} {run.version}, {run.when} ({run.name})" for word, run in ends]
        if differences := old.other_machine(new):
            lines.append(f"warning: other machine: {differences}")
        lines += map(str, self.changes)
        lines += self.notes()
        return lines

    def notes(self) -> Iterator[str]:
        """Yield what to keep in mind about the changes."""
        for run, other in ((self.old, self.new), (self.new, self.old)):
            if alone := [case.title for case in run.cases if case not in other.cases]:
                more = f", and {len(alone) - 3} more" if len(alone) > 3 else ""
                yield f"only in {run.name}: {', '.join(alone[:3])}{more}"
        if control := [f"{name} {100 * (x - 1):+.0f} %" for name, x in self.control()]:
            yield f"the time of peers, which are the same programs: {', '.join(control)}"
        expected = _CHANCE * len(self.changes)
        yield (
            f"without any change, chance alone would call up to {expected:.1f} of "
            f"{len(self.changes)} cases faster or slower, on average"
        )

    def to_json(self) -> dict[str, Any]:
        """Convert the comparison for JSON."""
        return {
            "old": {"file": self.old.name, "version": self.old.version, "when": self.old.when},
            "new": {"file": self.new.name, "version": self.new.version, "when": self.new.when},
            "other_machine": self.old.other_machine(self.new),
            "control": {name: round(factor, 4) for name, factor in self.control()},
            "changes": [
                {
                    "case": change.case.title,
                    "percent": round(estimate, 2),
                    "low": round(low, 2),
                    "high": round(high, 2),
                    "unstable": change.unstable,
                    "word": str(change),
                }
                for change in self.changes
                for estimate, low, high in [change.percentages()]
            ],
        }


def compare(old: RecordedRun, new: RecordedRun) -> Comparison:
    """Compare fastdist's time in every case that both runs have."""
    changes = [
        Change(
            case,
            ratio_interval(before, new.cases[case]),
            any(median_interval(x).is_unstable for x in (before, new.cases[case])),
        )
        for case, before in old.cases.items()
        if case in new.cases
    ]
    return Comparison(old, new, tuple(changes))


def run_compare(options: argparse.Namespace) -> int:
    """Compare two files; return 1 if a case is slower than `--fail-slower` allows.

    Raises:
        RunFileError: The files cannot be compared.
    """
    old, new = RecordedRun.read(options.old), RecordedRun.read(options.new)
    if (differences := old.other_machine(new)) and not options.force:
        raise RunFileError(
            f"{old.name} and {new.name} are from different machines, whose times cannot tell what "
            f"changed in fastdist: {differences}; --force compares them nevertheless"
        )
    if old.ranks != new.ranks:
        raise RunFileError(
            f"{old.name} has {old.ranks} ranks and {new.name} has {new.ranks}; expected the same"
        )
    comparison = compare(old, new)
    if not comparison.changes:
        raise RunFileError(f"{old.name} and {new.name} have no case in common")
    if options.json:
        show(json.dumps(comparison.to_json(), indent=1) + "\n")
    else:
        show(fitted("\n".join(comparison.lines()) + "\n", sys.stdout))
    if options.fail_slower is None:
        return 0
    slow = [c for c in comparison.changes if c.percentages()[1] > max(0.0, options.fail_slower)]
    return _FAILED if slow else 0
