"""Runs `fastdist bench compare`: what changed between two reports, case by case."""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fastdist.cli.bench.cases import Case
from fastdist.cli.bench.results import SAMPLES, median_interval, ratio_interval
from fastdist.cli.command import UsageError
from fastdist.processes.terminal import fitted, show

_FAILED = 1
_MACHINE = ("processor", "cores", "cache", "memory")
_CHANCE = 0.05


class RecordedRun:
    """The JSON of a report."""

    def __init__(self, name: str, recorded: Mapping[str, Any]) -> None:
        when = str(recorded["when"])  # in ISO 8601
        self.facts = {"file": name, "version": f"fastdist {recorded['fastdist']}", "when": when}
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


def _samples(figures: Mapping[str, Any]) -> list[float]:
    samples = [float(us) for us in figures["samples_us"]]
    if len(samples) != SAMPLES or not all(0 < us < math.inf for us in samples):
        raise ValueError(f"expected {SAMPLES} samples above 0, got {samples}")
    return samples


def _read(path: Path) -> RecordedRun:
    try:
        return RecordedRun(str(path), json.loads(path.read_text()))
    except (OSError, KeyError, TypeError, ValueError) as error:
        message = f"{path} is not a JSON file of `fastdist bench report`: {error!r}"
        raise UsageError(message) from None


def compare(old: RecordedRun, new: RecordedRun) -> list[dict[str, Any]]:
    """Return what `--json` writes of each case in both runs: the change in percent of the old."""
    changes = []
    for case in (case for case in old.samples if case in new.samples):
        samples = [run.samples[case]["fastdist"] for run in (old, new)]
        factor = ratio_interval(*samples)
        percents = [100 * (x - 1) for x in (factor.estimate, factor.low, factor.high)]
        estimate, low, high = percents
        found = f"no change found, 95 %: {-low:.0f} % faster to {high:.0f} % slower"
        if low > 0:
            found = f"{estimate:.0f} % slower, 95 %: {low:.0f} to {high:.0f}"
        elif high < 0:
            found = f"{-estimate:.0f} % faster, 95 %: {-high:.0f} to {-low:.0f}"
        unstable = any(median_interval(each).is_unstable for each in samples)
        word = f"{case.title}: {found}{' (unstable)' if unstable else ''}"
        figures = zip(("percent", "low", "high"), percents, strict=True)
        change = {"case": case.title} | {name: round(x, 2) for name, x in figures}
        changes.append(change | {"unstable": unstable, "word": word})
    return changes


def control(old: RecordedRun, new: RecordedRun) -> dict[str, float]:
    """Return how the machine changed the time of peers, of the same version in both runs."""
    factors = {}
    for name, version in old.engines.items():
        ratios = [
            statistics.median(samples[name]) / statistics.median(old.samples[case][name])
            for case, samples in new.samples.items()
            if name in samples and name in old.samples.get(case, {})
        ]
        if name != "fastdist" and new.engines.get(name) == version and ratios:
            factors[name] = statistics.median(ratios)
    return factors


def run_compare(options: argparse.Namespace) -> int:
    """Compare two files; return 1 if a case is slower than `--fail-slower` allows."""
    old, new = _read(options.old), _read(options.new)
    names = f"{options.old} and {options.new}"
    other_machine = ", ".join(
        f"{name} {fact} and {new.machine[name]}"
        for name, fact in old.machine.items()
        if fact != new.machine[name]
    )
    if other_machine and not options.force:
        raise UsageError(
            f"{names} are from different machines, whose times cannot tell what "
            f"changed in fastdist: {other_machine}; --force compares them nevertheless"
        )
    if old.ranks != new.ranks:
        found = f"{options.old} has {old.ranks} ranks and {options.new} has {new.ranks}"
        raise UsageError(f"{found}; expected the same")
    changes, factors = compare(old, new), control(old, new)
    if not changes:
        raise UsageError(f"{names} have no case in common")
    if options.json:
        comparison = {
            "old": old.facts,
            "new": new.facts,
            "other_machine": other_machine,
            "control": {name: round(factor, 4) for name, factor in factors.items()},
            "changes": changes,
        }
        show(json.dumps(comparison, indent=1) + "\n")
    else:
        lines = [
            f"{word} {run.facts['version']}, {run.facts['when']} ({run.facts['file']})"
            for word, run in (("from", old), ("to", new))
        ]
        if other_machine:
            lines.append(f"warning: other machine: {other_machine}")
        lines += [change["word"] for change in changes]
        for run, other in ((old, new), (new, old)):
            if alone := [case.title for case in run.samples if case not in other.samples]:
                more = f", and {len(alone) - 3} more" if len(alone) > 3 else ""
                lines.append(f"only in {run.facts['file']}: {', '.join(alone[:3])}{more}")
        if peers := [f"{name} {100 * (x - 1):+.0f} %" for name, x in factors.items()]:
            lines.append(f"the time of peers, which are the same programs: {', '.join(peers)}")
        lines.append(
            "without any change, chance alone would call up to "
            f"{_CHANCE * len(changes):.1f} of {len(changes)} cases faster or slower, on average\n"
        )
        show(fitted("\n".join(lines), sys.stdout))
    if options.fail_slower is None:
        return 0
    limit = max(0.0, options.fail_slower)
    return _FAILED if any(change["low"] > limit for change in changes) else 0
