"""`fastdist compare-runs`: tells at which step two recorded runs part."""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import suppress
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
    parting = _parting(first, second, steps)
    if options.json:
        show(json.dumps({"steps": len(steps), "last": steps[-1], "parting": parting}) + "\n")
    elif parting is None:
        show(f"equal in all {len(steps)} steps that both have recorded, up to step {steps[-1]}\n")
    else:
        threads, others = (run[parting["step"]]["threads"] for run in (first, second))
        show(_told(parting, threads, others, steps))
    return int(parting is not None)


def _parting(
    first: dict[int, Any], second: dict[int, Any], steps: list[int]
) -> dict[str, Any] | None:
    """Return what differs in the first step in which two records differ; None if they are equal.

    These are the step, the replicas whose own gradients differ, and the names of tensors by kind.
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
        found: dict[str, list[Any]] = {
            "replicas": [replica for replica, (mine, theirs) in own if mine != theirs]
        }
        found |= {kind: _differing(one[kind], other[kind]) for kind in _KINDS}
        if any(found.values()):
            return {"step": step, **found}
    return None


def _differing(one: dict[str, str], other: dict[str, str]) -> list[str]:
    return [name for name in one | other if one.get(name) != other.get(name)]


def _told(parting: dict[str, Any], threads: Any, others: Any, steps: list[int]) -> str:
    before = [step for step in steps if step < parting["step"]]
    since = f"; they are equal up to step {before[-1]}." if before else ", the first of both files."
    lines = [f"The runs part at step {parting['step']}{since}"]
    replicas = parting["replicas"]
    if replicas:
        some = f"replica {', '.join(map(str, replicas))}"
        who = "every replica" if len(replicas) == len(threads) else some
        why = "other parameters since an earlier step, data, random numbers or processors"
        if threads != others:
            why = f"torch had {threads} and {others} threads; set OMP_NUM_THREADS alike"
        lines.append(f"Own gradients differ on {who}: {why}.")
    elif parting["gradients"]:
        lines.append("Each replica's own gradients are equal, and their sums differ.")
    else:
        lines.append("Gradients are equal: the optimizer's settings or earlier states differ.")
    for kind in _KINDS:
        names = parting[kind]
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
            "trains with a strategy, in at least --record-every steps"
        )
    return records
