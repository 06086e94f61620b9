"""`fastdist compare-runs`: tells at which step two recorded runs part."""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fastdist.cli.command import UsageError, add_command
from fastdist.processes.terminal import fitted, show

_MOST_NAMES = 3
# What a line that a killed job has left raises.
_UNREADABLE = (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError)
_KINDS = ("gradients", "parameters", "states")
_DESCRIPTION = """\
Compares two files of fastdist run --record, and names the first step at which
the runs part, the replicas whose own gradients differ, and the tensors.
"""
_EPILOG = """\
exit code:
  0  if the runs are equal in all steps that both have recorded
  1  if they differ
  2  if a file cannot be read, or they have other replicas or no step in common
"""


@dataclass(frozen=True, slots=True)
class Parting:
    """The first step in which two runs differ.

    Attributes:
        replicas: replicas whose gradients, before they were reduced, differ.
        gradients: parameters whose reduced gradients differ.
        parameters: parameters that differ after the step.
        states: states of optimizers that differ after the step.
    """

    step: int
    replicas: list[int] = field(default_factory=list)
    gradients: list[str] = field(default_factory=list)
    parameters: list[str] = field(default_factory=list)
    states: list[str] = field(default_factory=list)


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the `compare-runs` command."""
    parser = add_command(
        subparsers,
        "compare-runs",
        "compare_runs:run",
        help="tell at which step two recorded runs part",
        description=_DESCRIPTION,
        epilog=_EPILOG,
    )
    parser.add_argument("first", type=Path, help="a file of fastdist run --record")
    parser.add_argument("second", type=Path, help="another one")
    parser.add_argument("--json", action="store_true", help="write JSON instead")


def run(options: argparse.Namespace) -> int:
    """Compare the files; return the exit code."""
    first, second = _read(options.first), _read(options.second)
    steps = sorted(first.keys() & second.keys())
    if not steps:
        raise UsageError(
            f"{options.first} and {options.second} have no step in common; record both with the "
            "same --record-every"
        )
    parting = find_parting(first, second, steps)
    if options.json:
        found = None if parting is None else asdict(parting)
        show(json.dumps({"steps": len(steps), "last": steps[-1], "parting": found}) + "\n")
    elif parting is None:
        show(f"equal in all {len(steps)} steps that both have recorded, up to step {steps[-1]}\n")
    else:
        threads, others = (run[parting.step]["threads"] for run in (first, second))
        show(_told(parting, threads, others, steps))
    return int(parting is not None)


def find_parting(first: dict[int, Any], second: dict[int, Any], steps: list[int]) -> Parting | None:
    """Return in which of the steps two records, by step, differ first; None if they do not.

    Raises:
        UsageError: they are equal up to a step of other numbers of replicas.
    """
    for step in steps:
        one, other = first[step], second[step]
        counts = len(one["replicas"]), len(other["replicas"])
        if counts[0] != counts[1]:
            since = f"from step {step} on, " if step != steps[0] else ""
            raise UsageError(
                f"{since}the runs have {counts[0]} and {counts[1]} replicas, whose bits may differ"
            )
        own = enumerate(zip(one["replicas"], other["replicas"], strict=True))
        parting = Parting(
            step,
            [replica for replica, (mine, theirs) in own if mine != theirs],
            *(_differing(one[kind], other[kind]) for kind in _KINDS),
        )
        if parting != Parting(step):
            return parting
    return None


def _differing(one: dict[str, str], other: dict[str, str]) -> list[str]:
    return [name for name in one | other if one.get(name) != other.get(name)]


def _told(parting: Parting, threads: Any, others: Any, steps: list[int]) -> str:
    before = [step for step in steps if step < parting.step]
    since = f"; they are equal up to step {before[-1]}." if before else ", the first of both files."
    lines = [f"The runs part at step {parting.step}{since}"]
    if parting.replicas:
        some = f"replica {', '.join(map(str, parting.replicas))}"
        who = "every replica" if len(parting.replicas) == len(threads) else some
        why = "other parameters since an earlier step, data, random numbers or processors"
        if threads != others:
            why = f"torch had {threads} and {others} threads; set OMP_NUM_THREADS alike"
        lines.append(f"Own gradients differ on {who}: {why}.")
    elif parting.gradients:
        lines.append("Each replica's own gradients are equal, and their sums differ.")
    else:
        lines.append("Gradients are equal: the optimizer's settings or earlier states differ.")
    for kind in _KINDS:
        names: list[str] = getattr(parting, kind)
        if names:
            more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
            lines.append(f"  {kind}: {', '.join(names[:_MOST_NAMES])}{more}")
    return fitted("\n".join(lines) + "\n", sys.stdout)


def _read(path: Path) -> dict[int, Any]:
    """Return the records of a file, by step; of a step that was made again, the last."""
    records = {}
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None
    for line in lines:
        with suppress(*_UNREADABLE):
            record = json.loads(line)
            values = [record[kind] for kind in _KINDS]
            lists = record["replicas"], record["threads"]
            if all(isinstance(v, list) for v in lists) and all(isinstance(v, dict) for v in values):
                records[int(record["step"])] = record
    if not records:
        raise UsageError(
            f"{path} has no record: expected the file of fastdist run --record, of a program that "
            "trains with a strategy"
        )
    return records
