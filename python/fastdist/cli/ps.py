"""`fastdist ps`: lists this user's jobs on this machine."""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import TYPE_CHECKING, Any

from fastdist.cli.command import add_command
from fastdist.processes.terminal import note, show, width_of

if TYPE_CHECKING:
    from fastdist.recorder.jobs import Job

_TITLES = ("job", "state", "ranks", "began", "last call", "pids", "program")


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the `ps` command."""
    parser = add_command(
        subparsers,
        "ps",
        "ps:run",
        help="list your jobs on this machine",
        description="Lists this user's jobs on this machine: those that run, and the last one\n"
        "that ended with an error. fastdist why JOB says why a job stands still.",
    )
    parser.add_argument("--json", action="store_true", help="write JSON instead")


def run(options: argparse.Namespace) -> None:
    """Print the jobs."""
    from fastdist.recorder.jobs import jobs_here  # numpy: only when it runs
    from fastdist.recorder.words import columns

    jobs, notes = jobs_here()
    if options.json:
        show(json.dumps([_facts(job) for job in jobs], indent=2) + "\n")
    elif jobs:
        width = width_of(sys.stdout)
        most_pids = 4 if width is None or width >= 100 else 1
        table = [_TITLES, *(_cells(_facts(job), most_pids) for job in jobs)]
        show("".join(f"{_cut(line, width)}\n" for line in columns(table)))
    else:
        show("no jobs\n")
    if not any(job.is_live for job in jobs):
        note("a job is listed once its ranks have called fastdist.init")
    for each in notes:
        note(f"fastdist ps: could not be seen: {each}")


def _cut(line: str, width: int | None) -> str:
    return line if width is None or len(line) <= width else f"{line[: width - 1]}…"


def _facts(job: Job) -> dict[str, Any]:
    now_s = time.monotonic()
    return {
        "job": job.id,
        "state": "running" if job.is_live else "dead",
        "ranks_here": [each.records.rank for each in job.ranks],
        "world_size": job.world_size,
        "began_s": now_s - job.began_s,
        "last_call_s": now_s - max(each.last_s for each in job.ranks),
        "pids": [each.records.pid for each in job.ranks],
        "program": job.ranks[0].records.program,
    }


def _cells(facts: dict[str, Any], most_pids: int) -> tuple[str, ...]:
    from fastdist.recorder.words import seconds

    ranks, world_size, pids = len(facts["ranks_here"]), facts["world_size"], facts["pids"]
    return (
        facts["job"][:8],
        facts["state"],
        str(world_size) if ranks == world_size else f"{ranks} of {world_size}",
        f"{seconds(facts['began_s'])} ago",
        f"{seconds(facts['last_call_s'])} ago",
        " ".join(map(str, pids[:most_pids])) + (" …" if len(pids) > most_pids else ""),
        facts["program"],
    )
