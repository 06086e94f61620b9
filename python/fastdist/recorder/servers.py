"""Says why a job with parameter servers stands still: who waits for which server, and why."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from fastdist.recorder.kinds import Kind
from fastdist.recorder.observation import Observation, ObservedRank
from fastdist.recorder.occupation import occupation_of
from fastdist.recorder.recording import SERVER
from fastdist.recorder.ring import Call
from fastdist.recorder.words import at, how_it_died, seconds, verb

_OVERDUE_S = 5.0
_CERTAIN = (Kind.MEMORY, Kind.FILES)
_BUSY_SHARE = 0.5

Found = tuple[Kind, str, Sequence[int], str]


@dataclass(frozen=True, slots=True)
class _Wait:
    """A task that waits for a server's reply."""

    task: ObservedRank
    call: Call

    @property
    def server(self) -> str:
        return f"{SERVER} {self.call.signature.root}"


def judge(seen: Observation) -> Found:
    """Say which task is the cause, by the first rule that fits."""
    waits = list(_waits(seen))
    return (
        _ended(seen, waits)
        or _stopped(seen, waits)
        or _late(seen, waits)
        or _nobody_waits(seen, waits)
    )


def goes_on(seen: Observation) -> bool:
    """True if requests are answered, as far as that can be seen."""
    return not _waits_long(seen) and any(each.has_advanced for each in seen.ranks)


def _waits_long(seen: Observation) -> bool:
    return any(seen.at_s - wait.call.entered_s > _OVERDUE_S for wait in _waits(seen))


def _waits(seen: Observation) -> Iterator[_Wait]:
    """Yield the requests that have waited at both moments."""
    for task in seen.ranks:
        before = {call.number for call in task.before.calls if call.is_running}
        for call in task.running:
            if call.number in before and not task.is_dead:
                yield _Wait(task, call)


def _ended(seen: Observation, waits: Sequence[_Wait]) -> Found | None:
    dead = _most_needed(each for each in seen.ranks if each.is_dead)
    if dead is None:
        return None
    sentence = f"{dead.records.task} is dead"
    if dead.ending is not None and dead.ending.error:
        sentence += f": {dead.ending.error}: {dead.ending.message}{at(dead.ending.line)}"
    else:
        sentence += how_it_died(dead)
    return Kind.DEAD, sentence + _those_who_wait(seen, waits, dead), [dead.rank], ""


def _stopped(seen: Observation, waits: Sequence[_Wait]) -> Found | None:
    stopped = _most_needed(each for each in seen.ranks if each.is_stopped)
    if stopped is None:
        return None
    sentence = f"{stopped.records.task} is stopped by a signal (SIGSTOP) or a debugger"
    return Kind.STOPPED, sentence + _those_who_wait(seen, waits, stopped), [stopped.rank], ""


def _most_needed(tasks: Iterable[ObservedRank]) -> ObservedRank | None:
    """Return a server if there is one, else the first task."""
    return min(tasks, key=lambda each: not each.records.task.startswith(SERVER), default=None)


def _late(seen: Observation, waits: Sequence[_Wait]) -> Found | None:
    """A server has not answered for long."""
    if not _waits_long(seen):
        return None
    oldest = min(waits, key=lambda wait: wait.call.entered_s)
    server = next((each for each in seen.ranks if each.records.task == oldest.server), None)
    if server is None:
        told = _those_who_wait_for(seen, waits, oldest.server)
        return Kind.UNKNOWN, f"{oldest.server} cannot be seen from here{told}", [], ""
    occupation = occupation_of(server)
    kind, what = Kind.UNKNOWN, "does not answer, though it runs"
    if occupation.kind in _CERTAIN:
        kind, what = occupation.kind, occupation.one
    elif server.cpu_share > _BUSY_SHARE:
        kind, what = Kind.SLOW, f"is busy: it computes on {server.cpu_share:.1f} cores"
    sentence = f"{oldest.server} {what}{_those_who_wait(seen, waits, server)}"
    return kind, sentence, [server.rank], oldest.call.site


def _nobody_waits(seen: Observation, waits: Sequence[_Wait]) -> Found:
    if waits:
        oldest = min(waits, key=lambda wait: wait.call.entered_s)
        told = _those_who_wait_for(seen, waits, oldest.server).removeprefix("; ")
        return Kind.SLOW, f"slow, not stuck: {told}", [], oldest.call.site
    if any(each.has_advanced for each in seen.ranks):
        return Kind.SLOW, "slow, not stuck: parameter servers answer", [], ""
    ends = [each.idle_since_s for each in seen.ranks]
    idle_s = seen.at_s - max(ends, default=seen.at_s)
    sentence = f"no task waits for a parameter server; the last reply came {seconds(idle_s)} ago"
    return Kind.UNKNOWN, sentence, [], ""


def _those_who_wait(seen: Observation, waits: Sequence[_Wait], server: ObservedRank) -> str:
    return _those_who_wait_for(seen, waits, server.records.task, "its")


def _those_who_wait_for(
    seen: Observation, waits: Sequence[_Wait], server: str, whose: str = ""
) -> str:
    """Return "; worker 1 waits for its reply to READ at train.py:9 in step, for 12 s"."""
    behind = [wait for wait in waits if wait.server == server]
    if not behind:
        return ""
    oldest = min(behind, key=lambda wait: wait.call.entered_s)
    who = sorted({wait.task.records.task for wait in behind})
    names = who[0] if len(who) == 1 else f"{', '.join(who[:-1])} and {who[-1]}"
    request = f"{oldest.call.signature.op}{at(oldest.call.site)}"
    age_s = seen.at_s - oldest.call.entered_s
    waiting = verb(who, "waits", "wait")
    whose = whose or f"{server}'s"
    return f"; {names} {waiting} for {whose} reply to {request}, for {seconds(age_s)}"
