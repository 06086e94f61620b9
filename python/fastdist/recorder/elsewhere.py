"""Observes the ranks of other machines, by asking their launchers; answers such questions."""

from __future__ import annotations

import contextlib
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from fastdist.cluster.address import split_address
from fastdist.recorder.encoding import decode, encode, read
from fastdist.recorder.frames import Stack
from fastdist.recorder.jobs import Job, jobs_here
from fastdist.recorder.machines import Machine, Machines
from fastdist.recorder.observation import (
    INTERVAL_S,
    Observation,
    ObservedRank,
    observe,
    with_stacks,
)
from fastdist.recorder.place import record_paths
from fastdist.recorder.questions import NoAnswerError, ask
from fastdist.recorder.ring import identity
from fastdist.recorder.system import Process

_RANKS, _STACKS = "ranks", "stacks"
_WITHIN_S = 2.0
_STACKS_WITHIN_S = 1.0
_MOST_AT_ONCE = 64
_FEW_CALLS = 64  # of the first moment: enough to see whether calls have begun or ended since

# Answers: a machine's ranks, by its own clock, or their stacks, by rank; and notes.
RanksThere = tuple[tuple[ObservedRank, ...], tuple[str, ...]]
StacksThere = tuple[dict[str, tuple[Stack, ...]], tuple[str, ...]]


def key_of(job: str) -> str | None:
    """Return the key by which other machines may ask about a job; None without such a job here."""
    found = _machines_of(job)
    return None if found is None else found.key


def answer_to(job: str, about: str) -> str:
    """Answer the question of another machine about the ranks of this one."""
    jobs, notes = jobs_here(job)
    if not jobs:
        return encode(((), notes))
    seen = observe(jobs[0], 0.0 if about == _STACKS else INTERVAL_S)
    if about == _STACKS:
        seen = with_stacks(replace(seen, notes=()), may_signal=False)
        return encode(({str(each.rank): each.stacks for each in seen.ranks}, seen.notes))
    return encode((tuple(map(_without_old_calls, seen.ranks)), (*notes, *seen.notes)))


def observe_everywhere(job: Job, interval_s: float) -> Observation:
    """Look at a job twice, on its other machines too, within about two seconds."""
    machines = _machines_of(job.id)
    here = {each.records.rank for each in job.ranks}
    others = [] if machines is None else [m for m in machines.machines if not here & set(m.ranks)]
    if machines is None or not others:
        return observe(job, interval_s)
    end_s = time.monotonic() + _WITHIN_S
    with ThreadPoolExecutor(min(len(others), _MOST_AT_ONCE)) as pool:
        asked: list[Future[tuple[RanksThere, float]]] = [
            pool.submit(_ask, each, machines.key, job.id, _RANKS, RanksThere, end_s)
            for each in others
        ]
        seen = observe(job, interval_s)
    ranks = {each.rank: each for each in seen.ranks}
    notes, unreached = list(seen.notes), []
    for machine, future in zip(others, asked, strict=True):
        try:
            (found, notes_there), ahead_s = future.result()
        except NoAnswerError as error:
            unreached.append((machine, error))
            continue
        notes += notes_there
        for each in found:
            ranks.setdefault(each.rank, _on_this_clock(each, machine.launcher, ahead_s))
    return replace(
        seen,
        ranks=tuple(ranks[rank] for rank in sorted(ranks)),
        missing=tuple(rank for rank in seen.missing if rank not in ranks),
        notes=tuple(notes),
        unreached=tuple(unreached),
    )


def with_stacks_everywhere(seen: Observation, may_signal: bool) -> Observation:
    """Add the stacks of the ranks that can answer, on other machines too."""
    there = {each.machine for each in seen.ranks if each.machine and not each.is_dead}
    machines = _machines_of(seen.job.id) if there else None
    if machines is None:
        return with_stacks(seen, may_signal)
    end_s = time.monotonic() + _STACKS_WITHIN_S
    with ThreadPoolExecutor(min(len(there), _MOST_AT_ONCE)) as pool:
        asked: list[Future[tuple[StacksThere, float]]] = [
            pool.submit(_ask, each, machines.key, seen.job.id, _STACKS, StacksThere, end_s)
            for each in machines.machines
            if each.launcher in there
        ]
        seen = with_stacks(seen, may_signal)
    stacks: dict[str, tuple[Stack, ...]] = {}
    notes = list(seen.notes)
    for future in asked:
        with contextlib.suppress(NoAnswerError):  # it has just answered
            (found, notes_there), _ = future.result()
            stacks |= found
            notes += notes_there
    ranks = [replace(each, stacks=stacks.get(str(each.rank), each.stacks)) for each in seen.ranks]
    return replace(seen, ranks=tuple(ranks), notes=tuple(notes))


def _ask(
    machine: Machine, key: str, job: str, about: str, kind: Any, end_s: float
) -> tuple[Any, float]:
    if not machine.launcher:
        raise NoAnswerError("no fastdist run answers there; ask on that machine")
    try:
        text, ahead_s = ask(split_address(machine.launcher), key, job, about, end_s)
        return decode(kind, text), ahead_s
    except ValueError:
        raise NoAnswerError("its launcher answers like another version of fastdist") from None


def _machines_of(job: str) -> Machines | None:
    own = (each for each in record_paths() if (who := identity(each.path)) and who.job == job)
    return next((found for each in own if (found := read(Machines, each.beside("machines")))), None)


def _without_old_calls(rank: ObservedRank) -> ObservedRank:
    calls = rank.before.calls
    kept = [call for call in calls[:-_FEW_CALLS] if call.is_running]
    before = replace(rank.before, calls=(*kept, *calls[-_FEW_CALLS:]))
    return replace(rank, before=before)


def _on_this_clock(rank: ObservedRank, launcher: str, ahead_s: float) -> ObservedRank:
    """Move the times of a rank that another machine has observed."""

    def later(process: Process | None) -> Process | None:
        return None if process is None else replace(process, at_s=process.at_s + ahead_s)

    return replace(
        rank,
        records=rank.records.later(ahead_s),
        before=rank.before.later(ahead_s),
        process=later(rank.process),
        earlier=later(rank.earlier),
        machine=launcher,
    )
