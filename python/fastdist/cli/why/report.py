"""Writes a diagnosis: the sentence, a table of ranks, and what could not be seen."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fastdist.cli.why.picture import check_plot, to_text, write_plot
from fastdist.processes.terminal import fitted, show
from fastdist.recorder.diagnosis import Diagnosis, diagnose
from fastdist.recorder.jobs import NoSuchJobError, find_job, jobs_here
from fastdist.recorder.observation import ObservedRank
from fastdist.recorder.words import columns, names, seconds, short

_TERMINAL = Path("-")
_STATES = {"R": "running", "S": "asleep", "D": "in the kernel", "I": "idle"}
_TITLES = ("rank", "host", "pid", "state", "phase", "last call", "since", "stack")


def run(options: argparse.Namespace) -> None:
    """Diagnose a job and print the result."""
    plot = options.plot
    if plot == _TERMINAL and options.json:
        raise ValueError("--plot - draws into the output of --json; use a file, or one of them")
    if plot is not None and plot != _TERMINAL:
        check_plot(plot)
    jobs, notes = jobs_here()
    try:
        job = find_job(jobs, options.job)
    except NoSuchJobError as error:
        raise NoSuchJobError("; ".join([str(error), *notes])) from None
    diagnosis = diagnose(job, everywhere=True)
    unseen = [*notes, *diagnosis.observation.notes, *_missing(diagnosis)]
    if options.json:
        show(_to_json(diagnosis, unseen))
    else:
        show(fitted(_to_text(diagnosis, unseen), sys.stdout))
    if plot == _TERMINAL:
        show(fitted("\n" + to_text(diagnosis.observation.ranks), sys.stdout))
    elif plot is not None:
        write_plot(diagnosis, plot)


def _rows(diagnosis: Diagnosis) -> Iterator[dict[str, Any]]:
    """Yield what the table shows of each rank, by the names of JSON."""
    now_s = diagnosis.observation.at_s
    for each in diagnosis.observation.ranks:
        call = each.last_call
        is_in_call = call is not None and call.is_running and not each.is_dead
        began_s = call.entered_s if call is not None and is_in_call else each.idle_since_s
        yield {
            "rank": each.rank,
            "task": each.records.task,
            "host": each.records.host,
            "pid": each.records.pid,
            "state": _state(each),
            "phase": each.records.phase.name.lower(),
            "call": "" if call is None else str(call.signature),
            "site": "" if call is None else call.site,
            "is_in_call": is_in_call,
            "since_s": now_s - began_s,  # in its call, or since its last call
            "stack": each.line or (each.ending.line if each.ending else ""),
        }


def _state(rank: ObservedRank) -> str:
    if rank.process is None:
        return "unseen"
    if rank.is_dead:
        return "dead"
    if rank.stopped_by:
        return "stopped"
    return "running" if rank.cpu_share > 0.5 else _STATES.get(rank.process.state, "unknown")


def _missing(diagnosis: Diagnosis) -> list[str]:
    seen = diagnosis.observation
    notes = [f"{names(each.ranks)}, on {each.ip}: {why}" for each, why in seen.unreached]
    asked = {rank for each, _ in seen.unreached for rank in each.ranks}
    rest = [rank for rank in seen.missing if rank not in asked]
    if rest:
        numbers = ", ".join(map(str, rest[:16])) + (", …" if len(rest) > 16 else "")
        where = "" if seen.is_of_one_machine else ", which may be on other machines"
        notes.append(f"{len(rest)} of {seen.job.world_size} ranks{where}: {numbers}")
    return notes


def _to_text(diagnosis: Diagnosis, unseen: list[str]) -> str:
    table = [_TITLES, *(_cells(row) for row in _rows(diagnosis))]
    if len({each.records.host for each in diagnosis.observation.ranks}) == 1:
        table = [(rank, *rest) for rank, _, *rest in table]
    sentence = diagnosis.sentence[0].upper() + diagnosis.sentence[1:] + "."
    lines = [sentence, "", *columns(table)]
    if unseen:
        lines += ["", "could not be seen:", *(f"  {note}" for note in unseen)]
    return "\n".join(lines) + "\n"


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    call = f"{row['call']} {short(row['site'])}".strip()
    since = seconds(row["since_s"])
    return (
        *(row["task"] or str(row["rank"]), row["host"], str(row["pid"]), row["state"]),
        *(row["phase"], call or "none"),
        *(f"in it for {since}" if row["is_in_call"] else since, short(row["stack"])),
    )


def _to_json(diagnosis: Diagnosis, unseen: list[str]) -> str:
    seen = diagnosis.observation
    facts = {
        "job": seen.job.id,
        "world_size": seen.job.world_size,
        "class": diagnosis.kind.value,
        "sentence": diagnosis.sentence,
        "ranks": diagnosis.ranks,
        "line": diagnosis.line,
        "table": list(_rows(diagnosis)),
        "not_seen": unseen,
    }
    return json.dumps(facts, indent=2, ensure_ascii=False) + "\n"
