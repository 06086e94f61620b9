"""Says why a job with parameter servers stands still: which tasks wait for a server, and why."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fastdist.recorder.observation import Observation, ObservedRank
from fastdist.recorder.occupation import BUSY_SHARE, Kind, occupation_of
from fastdist.recorder.ring import SERVER, Call
from fastdist.recorder.words import at, how_it_died, seconds, verb

_OVERDUE_S = 5.0
_CERTAIN = (Kind.MEMORY, Kind.FILES)

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
    return _ended(seen) or _stopped(seen) or _late(seen) or _nobody_waits(seen)


def goes_on(seen: Observation) -> bool:
    """Return True if requests are answered, as far as that can be seen."""
    return _overdue(seen) is None and any(each.has_advanced for each in seen.ranks)


def _overdue(seen: Observation) -> _Wait | None:
    """Return the oldest waiting request if it is overdue."""
    return next((w for w in _waits(seen) if seen.at_s - w.call.entered_s > _OVERDUE_S), None)


def _waits(seen: Observation) -> list[_Wait]:
    """Return the requests that have waited at both moments, the oldest first."""
    waits = [_Wait(task, call) for task in seen.ranks if not task.is_dead for call in task.waiting]
    return sorted(waits, key=lambda wait: wait.call.entered_s)


def _ended(seen: Observation) -> Found | None:
    dead = _most_needed(each for each in seen.ranks if each.is_dead)
    if dead is None:
        return None
    waiting = _those_who_wait(seen, dead.records.task)
    return Kind.DEAD, f"{dead.records.task} is dead{how_it_died(dead)}{waiting}", [dead.rank], ""


def _stopped(seen: Observation) -> Found | None:
    stopped = _most_needed(each for each in seen.ranks if each.is_stopped)
    if stopped is None:
        return None
    by = "" if stopped.process is None else stopped.process.stopped_by
    sentence = f"{stopped.records.task} is stopped by {by}"
    return Kind.STOPPED, sentence + _those_who_wait(seen, stopped.records.task), [stopped.rank], ""


def _most_needed(tasks: Iterable[ObservedRank]) -> ObservedRank | None:
    """Return a server if there is one, else the first task."""
    return min(tasks, key=lambda each: not each.records.task.startswith(SERVER), default=None)


def _late(seen: Observation) -> Found | None:
    """Find the server that has not answered the oldest overdue request."""
    oldest = _overdue(seen)
    if oldest is None:
        return None
    server = next((each for each in seen.ranks if each.records.task == oldest.server), None)
    if server is None:
        told = _those_who_wait(seen, oldest.server, f"{oldest.server}'s")
        return Kind.UNKNOWN, f"{oldest.server} cannot be seen from here{told}", [], ""
    occupation = occupation_of(server)
    kind, what = Kind.UNKNOWN, "does not answer, though it runs"
    if occupation.kind in _CERTAIN:
        kind, what = occupation.kind, occupation.one
    elif server.cpu_share > BUSY_SHARE:
        kind, what = Kind.SLOW, f"is busy: it computes on {server.cpu_share:.1f} cores"
    sentence = f"{oldest.server} {what}{_those_who_wait(seen, oldest.server)}"
    return kind, sentence, [server.rank], oldest.call.site


def _nobody_waits(seen: Observation) -> Found:
    if waits := _waits(seen):
        oldest = waits[0]
        told = _those_who_wait(seen, oldest.server, f"{oldest.server}'s").removeprefix("; ")
        return Kind.SLOW, f"slow, not stuck: {told}", [], oldest.call.site
    if any(each.has_advanced for each in seen.ranks):
        return Kind.SLOW, "slow, not stuck: parameter servers answer", [], ""
    ends = [each.idle_since_s for each in seen.ranks]
    idle_s = seen.at_s - max(ends, default=seen.at_s)
    sentence = f"no task waits for a parameter server; the last reply came {seconds(idle_s)} ago"
    return Kind.UNKNOWN, sentence, [], ""


def _those_who_wait(seen: Observation, server: str, whose: str = "its") -> str:
    """Return "; worker 1 waits for its reply to READ at train.py:9 in step, for 12 s"."""
    behind = [wait for wait in _waits(seen) if wait.server == server]
    if not behind:
        return ""
    oldest = behind[0]
    who = sorted({wait.task.records.task for wait in behind})
    names = who[0] if len(who) == 1 else f"{', '.join(who[:-1])} and {who[-1]}"
    request = f"{oldest.call.signature.op}{at(oldest.call.site)}"
    age_s = seen.at_s - oldest.call.entered_s
    waiting = verb(who, "waits", "wait")
    return f"; {names} {waiting} for {whose} reply to {request}, for {seconds(age_s)}"
