"""Says why a job with parameter servers stands still: which tasks wait for a server, and why."""

from __future__ import annotations

from collections.abc import Sequence

from fastdist.recorder.observation import Observation, ObservedRank
from fastdist.recorder.occupation import BUSY_SHARE, Kind, occupation_of
from fastdist.recorder.ring import SERVER, Call
from fastdist.recorder.words import at, how_it_died, seconds, verb

_OVERDUE_S = 5.0
_CERTAIN = (Kind.MEMORY, Kind.FILES)

Found = tuple[Kind, str, Sequence[int], str]


def judge(seen: Observation) -> Found:
    """Say which task is the cause, by the first rule that fits."""
    # A dead or stopped server matters most, then other such tasks.
    tasks = sorted(seen.ranks, key=lambda each: not each.records.task.startswith(SERVER))
    for task in tasks:
        if task.is_dead:
            return _told(seen, Kind.DEAD, task, f"is dead{how_it_died(task)}")
    for task in tasks:
        if task.stopped_by:
            return _told(seen, Kind.STOPPED, task, f"is stopped by {task.stopped_by}")
    return _late(seen) or _nobody_waits(seen)


def goes_on(seen: Observation) -> bool:
    """Return True if requests are answered, as far as that can be seen."""
    return _overdue(seen) is None and any(each.has_advanced for each in seen.ranks)


def _overdue(seen: Observation) -> Call | None:
    """Return the oldest waiting request if it is overdue."""
    return next((c for _, c in _waits(seen) if seen.at_s - c.entered_s > _OVERDUE_S), None)


def _waits(seen: Observation) -> list[tuple[str, Call]]:
    """Return the requests that have waited at both moments, with their tasks, the oldest first."""
    live = [each for each in seen.ranks if not each.is_dead]
    waits = [(each.records.task, call) for each in live for call in each.waiting]
    return sorted(waits, key=lambda wait: wait[1].entered_s)


def _server_of(request: Call) -> str:
    return f"{SERVER} {request.signature.root}"


def _told(seen: Observation, kind: Kind, task: ObservedRank, what: str, line: str = "") -> Found:
    name = task.records.task
    return kind, f"{name} {what}{_those_who_wait(seen, name)}", [task.rank], line


def _late(seen: Observation) -> Found | None:
    """Find the server that has not answered the oldest overdue request."""
    oldest = _overdue(seen)
    if oldest is None:
        return None
    name = _server_of(oldest)
    server = next((each for each in seen.ranks if each.records.task == name), None)
    if server is None:
        told = _those_who_wait(seen, name, f"{name}'s")
        return Kind.UNKNOWN, f"{name} cannot be seen from here{told}", [], ""
    occupation = occupation_of(server)
    kind, what = Kind.UNKNOWN, "does not answer, though it runs"
    if occupation.kind in _CERTAIN:
        kind, what = occupation.kind, occupation.one
    elif server.cpu_share > BUSY_SHARE:
        kind, what = Kind.SLOW, f"is busy: it computes on {server.cpu_share:.1f} cores"
    return _told(seen, kind, server, what, oldest.site)


def _nobody_waits(seen: Observation) -> Found:
    if waits := _waits(seen):
        oldest = waits[0][1]
        name = _server_of(oldest)
        told = _those_who_wait(seen, name, f"{name}'s").removeprefix("; ")
        return Kind.SLOW, f"slow, not stuck: {told}", [], oldest.site
    if any(each.has_advanced for each in seen.ranks):
        return Kind.SLOW, "slow, not stuck: parameter servers answer", [], ""
    ends = [each.idle_since_s for each in seen.ranks]
    idle_s = seen.at_s - max(ends, default=seen.at_s)
    sentence = f"no task waits for a parameter server; the last reply came {seconds(idle_s)} ago"
    return Kind.UNKNOWN, sentence, [], ""


def _those_who_wait(seen: Observation, server: str, whose: str = "its") -> str:
    """Return "; worker 1 waits for its reply to READ at train.py:9 in step, for 12 s"."""
    behind = [wait for wait in _waits(seen) if _server_of(wait[1]) == server]
    if not behind:
        return ""
    oldest = behind[0][1]
    who = sorted({task for task, _ in behind})
    names = who[0] if len(who) == 1 else f"{', '.join(who[:-1])} and {who[-1]}"
    request = f"{oldest.signature.op}{at(oldest.site)}"
    waiting = verb(who, "waits", "wait")
    age_s = seen.at_s - oldest.entered_s
    return f"; {names} {waiting} for {whose} reply to {request}, for {seconds(age_s)}"
