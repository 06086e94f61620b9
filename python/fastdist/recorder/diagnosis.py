"""Says in one sentence why a job stands still."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from fastdist.recorder import servers
from fastdist.recorder.elsewhere import observe_everywhere, with_stacks_everywhere
from fastdist.recorder.endings import Ending
from fastdist.recorder.jobs import Job
from fastdist.recorder.observation import INTERVAL_S, Observation, ObservedRank, observe
from fastdist.recorder.occupation import Kind, is_outside_calls, occupation_of
from fastdist.recorder.phases import Phase
from fastdist.recorder.ring import Call
from fastdist.recorder.servers import Found
from fastdist.recorder.signatures import Signature
from fastdist.recorder.timeline import Lateness, RankTimeline, find_late, traced
from fastdist.recorder.waits import UNSEEN, Wait, causes, waits_of
from fastdist.recorder.words import at, how_it_died, in_words, names, seconds, they, verb

_YOUNG_S = 5.0
_FEW_WAITS = 5
_LATE_S = 1e-3
_LATELY = 100  # calls
_FEW_CALLS = 20  # too few to tell before 5 s what is unusual


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The reason why a job stands still, the ranks that are the cause, and their line of code."""

    kind: Kind
    sentence: str
    ranks: tuple[int, ...]
    line: str
    observation: Observation


@dataclass(frozen=True, slots=True)
class _Case:
    """An observation with its waits, for the rules.

    Attributes:
        ends: ranks that others wait for, and that wait for nobody.
        circle: ranks that wait for each other.
        outside: ranks whose main thread is outside of calls.
    """

    seen: Observation
    waits: Sequence[Wait]
    ends: frozenset[int]
    circle: Sequence[int]
    outside: frozenset[int]

    @property
    def live(self) -> list[ObservedRank]:
        return [each for each in self.seen.ranks if not each.is_dead]

    @property
    def dead(self) -> list[ObservedRank]:
        return [each for each in self.seen.ranks if each.is_dead]

    @property
    def endings(self) -> dict[int, Ending]:
        """The ends of the dead ranks, as far as they are known."""
        return {each.rank: each.ending for each in self.dead if each.ending is not None}

    def ended_by(self, error: str) -> dict[int, Ending]:
        return {rank: each for rank, each in self.endings.items() if each.error == error}

    @property
    def awaited_in_vain(self) -> set[int]:
        """The living ranks for which others waited until a timeout that ended them."""
        gave_up = self.ended_by("CollectiveTimeoutError").values()
        return {rank for each in gave_up for rank in each.ranks} & {each.rank for each in self.live}

    @property
    def cut(self) -> dict[int, str]:
        """The addresses of the ranks on machines that cannot be reached."""
        lost = [machine for machine, why in self.seen.unreached if why.is_cut]
        return {rank: each.ip for each in lost for rank in each.ranks}

    @property
    def in_rendezvous(self) -> list[ObservedRank]:
        """The living ranks that make a communicator."""
        return [each for each in self.live if each.records.phase is Phase.RENDEZVOUS]

    def age_s(self, moment_s: float) -> float:
        return self.seen.at_s - moment_s

    def those_who_wait(self, ranks: Sequence[int], told: str = "") -> str:
        """Return "; ranks 0 and 2 wait for it in all_reduce(…) at train.py:9 in step, for 12 s".

        `told`: the call that the sentence has named already, with its line.
        """
        waits = [w for w in self.waits if w.behind & set(ranks) and w.rank not in ranks]
        if not waits:
            return self._those_in_rendezvous(ranks)
        oldest = min(waits, key=lambda wait: wait.call.entered_s).call
        who = sorted({wait.rank for wait in waits})
        call = in_words(oldest)
        where = f"for {verb(ranks, 'it', 'them')} {'there' if call == told else 'in ' + call}"
        if not {each.rank for each in self.live} & set(who):
            return f"; {names(who)}, which waited {where}, ended too"
        age_s = self.age_s(oldest.entered_s)
        text = f"; {they(who, 'waits', 'wait')} {where}, for {seconds(age_s)}"
        others = {w.rank for w in self.waits if w.behind} - {*who, *ranks}
        if others:
            text += f", and {names(others)} in turn {verb(others, 'waits', 'wait')} for others"
        return text

    def _those_in_rendezvous(self, ranks: Sequence[int]) -> str:
        waiting = [each for each in self.in_rendezvous if each.rank not in ranks]
        if not waiting:
            return ""
        who = they([each.rank for each in waiting], "waits", "wait")
        age_s = self.age_s(min(each.records.phase_since_s for each in waiting))
        return (
            f"; {who} for {verb(ranks, 'it', 'them')} to make a communicator"
            f"{at(waiting[0].line)}, for {seconds(age_s)}"
        )


def diagnose(
    job: Job,
    interval_s: float = INTERVAL_S,
    *,
    everywhere: bool = False,
    may_signal: bool = True,
) -> Diagnosis:
    """Find out why a job stands still, within a second or so, without asking its ranks.

    Ranks that can answer write their stacks, unless the job continues.

    Args:
        interval_s: seconds between the two moments at which its ranks are looked at.
        everywhere: look at the ranks of other machines too, by asking their launchers, which takes
            up to three seconds if machines do not answer.
        may_signal: interrupt the waits of C code that holds the GIL, to learn where it is.
    """
    seen = observe_everywhere(job, interval_s) if everywhere else observe(job, interval_s)
    if any(each.records.task for each in seen.ranks):
        seen = seen if servers.goes_on(seen) else with_stacks_everywhere(seen, may_signal)
        found = servers.judge(seen)
    else:
        case = _judge(seen)
        if (not case.dead or case.awaited_in_vain) and not _goes_on(case):
            seen = with_stacks_everywhere(seen, may_signal)
            case = _judge(seen)
        found = next(told for rule in _RULES if (told := rule(case)) is not None)
    kind, sentence, ranks, line = found
    return Diagnosis(kind, sentence, tuple(sorted(ranks)), line, seen)


def _judge(seen: Observation) -> _Case:
    waits = waits_of(seen.ranks, seen.missing)
    outside = frozenset(each.rank for each in seen.ranks if is_outside_calls(each))
    ends, circle = causes(waits, outside)
    case = _Case(seen, waits, ends, circle, outside)
    if not any(wait.behind for wait in waits) and case.in_rendezvous:
        # Others have not come to where these make a communicator.
        absent = {each.rank for each in case.live} - {each.rank for each in case.in_rendezvous}
        case = replace(case, ends=frozenset(absent or seen.missing))
    return case


# --- rules, in order of certainty ---------------------------------------------------------------


def _other_call(case: _Case) -> Found | None:
    """Find ranks that made different calls with the same number, which failed."""
    together: dict[tuple[int, int], dict[int, Call]] = defaultdict(dict)
    for each in case.seen.ranks:
        call = each.last_call
        if call is not None and call.is_failed and not call.signature.is_pairwise:
            together[call.place][each.rank] = call
    for calls in together.values():
        alike: dict[Signature, list[int]] = defaultdict(list)
        for rank, call in sorted(calls.items()):
            alike[call.signature].append(rank)
        if len(alike) > 1:
            return _disagreement(calls, sorted(alike.values(), key=lambda each: (-len(each), each)))
    return _mismatch_in_words(case)


def _disagreement(calls: dict[int, Call], groups: list[list[int]]) -> Found:
    """Blame the smallest of the groups of ranks whose calls agree."""
    usual, *others = groups
    odd = others[-1]
    theirs, ours = calls[odd[0]], calls[usual[0]]
    sentence = (
        f"{names(odd)} called {in_words(theirs)} where {names(usual)} called {in_words(ours)}"
    )
    between = [rank for group in others[:-1] for rank in group]
    if between:
        sentence += f"; {names(between)} called others"
    # Two groups of equal size: either may be wrong.
    ranks = odd if len(odd) < len(usual) else [*odd, *usual]
    return Kind.OTHER_CALL, sentence, ranks, theirs.site


def _mismatch_in_words(case: _Case) -> Found | None:
    """Find a mismatch error of calls that look equal, such as of lists of arrays."""
    mismatches = case.ended_by("CollectiveMismatchError").values()
    if case.circle or not mismatches:
        return None
    # Each error names the ranks whose calls differ from its own. The majority's names the fewest.
    ending = min(mismatches, key=lambda each: len(each.ranks))
    return Kind.OTHER_CALL, ending.message, ending.ranks or list(case.endings), ending.line


def _other_order(case: _Case) -> Found | None:
    """Find ranks that wait for each other in a circle."""
    # Ranks that were killed in their calls may have been about to end them.
    killed = any(each.rank in case.circle and each.running for each in case.dead)
    if len(case.circle) < 2 or (killed and not case.ended_by("CollectiveMismatchError")):
        return None
    waits = {wait.rank: wait for wait in case.waits if wait.behind & set(case.circle)}
    parts = [_wait_in_words(case, waits[rank]) for rank in case.circle]
    keys = {waits[rank].call.member.key for rank in case.circle}
    what = "calls of different communicators" if len(keys) > 1 else "calls"
    sentence = f"ranks make {what} in different orders: {', and '.join(dict.fromkeys(parts))}"
    return Kind.OTHER_ORDER, sentence, case.circle, waits[case.circle[0]].call.site


def _wait_in_words(case: _Case, wait: Wait) -> str:
    call = wait.call
    same = {wait.rank}
    if not call.signature.is_pairwise:
        collectives = [each for each in case.waits if not each.call.signature.is_pairwise]
        same |= {w.rank for w in collectives if w.call.place == call.place}
    who = they(same, "waits", "wait")
    return f"{who} for {names(wait.behind)} in {call.signature.op}{at(call.site)}"


def _given_up(case: _Case) -> Found | None:
    """Judge living ranks by what they do, for which others waited until a timeout ended them."""
    awaited = case.awaited_in_vain
    if not awaited:
        return None
    gave_up = sorted(case.ended_by("CollectiveTimeoutError"))
    waits = [wait for wait in case.waits if wait.rank not in gave_up]
    narrowed = replace(case, ends=frozenset(awaited), waits=waits)
    found = _stopped(narrowed) or _busy_elsewhere(narrowed)
    if found is None:
        return None
    kind, sentence, ranks, line = found
    first = case.seen.rank(gave_up[0])
    call = in_words(first.last_call if first else None)
    sentence += f"; {names(gave_up)} gave up waiting for {verb(ranks, 'it', 'them')}"
    return kind, f"{sentence}{' in ' + call if call else ''}, and ended", ranks, line


def _dead(case: _Case) -> Found | None:
    """Find ranks that have ended, if the others do not continue without them."""
    if not case.dead:
        return None
    if case.live and all(each.has_advanced for each in case.live):
        return None  # the others continue
    late = _timed_out(case)
    if late is not None:
        return late
    blamed = _blamed(case)
    if set(blamed) <= case.cut.keys():
        return _out_of_reach(case, blamed)
    first = case.seen.rank(blamed[0])
    line = "" if first is None else _last_line(first)
    return Kind.DEAD, _obituary(case, blamed), blamed, line


def _blamed(case: _Case) -> list[int]:
    """Return the dead ranks that ended first, as far as that is known."""
    endings = case.endings
    followed = case.ended_by("PeerFailureError").keys()
    named = {rank for ending in endings.values() for rank in ending.ranks}
    first = {rank for rank, each in endings.items() if each.was_first}
    raised = endings.keys() - followed
    unfailed = {each.rank for each in case.dead if each.last_call and not each.last_call.is_failed}
    awaited = unfailed & case.ends
    dead = {each.rank for each in case.dead}
    candidates = (first, raised & named, named - followed, raised, awaited, unfailed, dead)
    return sorted(next((found for found in candidates if found), set()))


def _obituary(case: _Case, ranks: Sequence[int]) -> str:
    first = case.seen.rank(ranks[0])
    sentence = f"{they(ranks, 'is', 'are')} dead"
    if first is None and not case.seen.is_of_one_machine:
        told = names([each.rank for each in case.dead])
        return f"{sentence} or cut off, as {told} noticed" + case.those_who_wait(ranks)
    if first is None:
        return (
            sentence + f": {verb(ranks, 'its records are', 'their records are')} gone, as after "
            "an end without an exception" + case.those_who_wait(ranks)
        )
    sentence += how_it_died(first)
    if first.ending is not None and first.ending.error:
        return sentence
    if 1 < len(ranks) < len(case.dead):
        sentence += "; which of them ended first cannot be told"
    call, told = first.last_call, ""
    if call is not None and len(ranks) == 1:
        told = in_words(call)
        sentence += f"; it ended {'inside of' if call.is_running else 'after'} {told}"
    return sentence + case.those_who_wait(ranks, told)


def _last_line(rank: ObservedRank) -> str:
    if rank.ending is not None and rank.ending.line:
        return rank.ending.line
    return rank.last_call.site if rank.last_call else ""


def _timed_out(case: _Case) -> Found | None:
    """Find ranks that were too late for the timeout of a call, if all ranks have ended."""
    waited = list(case.ended_by("CollectiveTimeoutError").values())
    late = {rank for ending in waited for rank in ending.ranks} - case.endings.keys()
    if case.live or not late:
        return None
    message = waited[0].message.partition("; last collective")[0]
    sentence = f"{names(late)} did not arrive within the timeout: {message}"
    return Kind.USER, sentence, sorted(late), ""


def _stopped(case: _Case) -> Found | None:
    """Find ranks that are stopped: by a signal, a debugger or a frozen container."""
    stopped = [each for each in case.live if each.stopped_by]
    if case.ends:
        stopped = [each for each in stopped if each.rank in case.ends]
    if not stopped:
        return None
    ranks = [each.rank for each in stopped]
    call = stopped[0].last_call
    sentence, told = f"{they(ranks, 'is', 'are')} stopped by {stopped[0].stopped_by}", ""
    if call is not None and len(ranks) == 1:
        told = in_words(call)
        sentence += f" {'in' if call.is_running else 'after'} {told}"
    line = call.site if call is not None else ""
    return Kind.STOPPED, sentence + case.those_who_wait(ranks, told), ranks, line


def _slow(case: _Case) -> Found | None:
    """Report a slow job, in which calls continue or no call is older than usual."""
    if not case.live or not _goes_on(case):
        return None
    late = _late(case.seen.ranks)
    if late is not None:
        return Kind.SLOW, f"slow, not stuck: {late.how_often}", [late.rank], late.site
    ranks = sorted(case.ends - {UNSEEN})
    if ranks:
        why = f"{they(ranks, 'is', 'are')} late, but not unusually so yet"
        why += case.those_who_wait(ranks)
    elif any(each.has_advanced for each in case.live):
        why = "calls begin and end as usual"
    else:
        idle_s = case.age_s(max(each.idle_since_s for each in case.live))
        why = f"no rank waits for another; the last call ended {seconds(idle_s)} ago"
    return Kind.SLOW, f"slow, not stuck: {why}", ranks, ""


def _late(ranks: Sequence[ObservedRank]) -> Lateness | None:
    """Return the rank that the others waited for much more often than for any other."""
    timelines = [
        RankTimeline(each.rank, "", calls=[traced(call) for call in each.records.calls[-_LATELY:]])
        for each in ranks
    ]
    found = find_late(timelines, _LATE_S)
    if sum(each.count for each in found) < _FEW_WAITS:
        return None
    share = min(0.9, 2 / len(ranks))
    return found[0] if found[0].share >= share else None


def _goes_on(case: _Case) -> bool:
    if any(each.is_dead or each.stopped_by for each in case.seen.ranks) or len(case.circle) > 1:
        return False
    moving = [case.seen.rank(rank) for rank in case.ends] or case.live
    if all(each is not None and each.has_advanced for each in moving):
        return True
    if case.waits:
        return not any(_is_overdue(case, wait) for wait in case.waits)
    since_s = [max(each.idle_since_s, each.records.phase_since_s) for each in case.live]
    return any(case.age_s(moment_s) < _YOUNG_S for moment_s in since_s)


def _is_overdue(case: _Case, wait: Wait) -> bool:
    """Return True if a call was given up, or is older than 5 s or 5 times the p99 of its line."""
    age_s = case.age_s(wait.call.entered_s)
    if not wait.call.is_running or age_s > _YOUNG_S:
        return True
    rank = case.seen.rank(wait.rank)
    unusual_s = rank.records.unusual_s(wait.call, _FEW_CALLS) if rank is not None else None
    return unusual_s is not None and age_s > max(unusual_s, 1.0)


def _busy_elsewhere(case: _Case) -> Found | None:
    """Find ranks that have not arrived at the call in which the others wait."""
    late = [each for rank in sorted(case.ends) if (each := case.seen.rank(rank)) is not None]
    if not case.ends and not any(wait.behind for wait in case.waits):
        late = case.live
    occupations = {each.rank: occupation_of(each) for each in late}
    for wait in case.waits:
        found = occupations.get(wait.rank)
        if found is not None and found.kind is Kind.USER and wait.rank not in case.outside:
            del occupations[wait.rank]  # it is in a call
    for kind in Kind:
        ranks = [rank for rank, found in occupations.items() if found.kind is kind]
        if ranks:
            first = next(each for each in late if each.rank == ranks[0])
            does = they(ranks, occupations[first.rank].one, occupations[first.rank].several)
            return kind, does + _whereabouts(case, first, ranks), ranks, first.line
    return None


def _whereabouts(case: _Case, first: ObservedRank, ranks: Sequence[int]) -> str:
    """Tell where late ranks are, since when, and who waits for them."""
    words, call, told = at(first.line), first.last_call, in_words(first.last_call)
    if call is not None and not call.is_running:
        words += f", {seconds(case.age_s(first.idle_since_s))} after {told}"
    elif call is not None and not first.line:
        words += f" in {told}"
    words += case.those_who_wait(ranks, told)
    is_alone = len(ranks) > 1 and not case.waits and not case.in_rendezvous
    return words + ("; no rank waits for another" if is_alone else "")


def _unreachable(case: _Case) -> Found | None:
    """Find ranks that the others wait for, on machines that cannot be reached."""
    ranks = sorted(case.cut.keys() & case.ends)
    return _out_of_reach(case, ranks) if ranks else None


def _out_of_reach(case: _Case, ranks: Sequence[int]) -> Found:
    ips = list(dict.fromkeys(case.cut[rank] for rank in ranks))
    where = ", ".join(ips[:8]) + (", …" if len(ips) > 8 else "")
    sentence = f"{names(ranks)} cannot be reached: nothing answers at {where}{_unanswered(case)}"
    return Kind.LINK, sentence + case.those_who_wait(ranks), ranks, ""


def _unanswered(case: _Case) -> str:
    lossy = [(each, lost) for each in case.live if (lost := each.worst_connection) is not None]
    if not lossy:
        return ""
    rank, lost = max(lossy, key=lambda each: each[1].retransmissions)
    return f"; {names([rank.rank])} gets no answers from {lost}"


def _in_progress(case: _Case) -> Found | None:
    """Report a call that all ranks have begun and that still runs."""
    whole = [wait for wait in case.waits if not wait.behind]
    if case.ends & {UNSEEN, *case.seen.missing} or not whole:
        return None
    oldest = min(whole, key=lambda wait: wait.call.entered_s)
    call, rank = oldest.call, case.seen.rank(oldest.rank)
    keys = [member.key for member in rank.records.members] if rank is not None else []
    if keys.count(call.member.key) > 1:
        who = f"the ranks of {in_words(call)} are threads of one process"
        return Kind.UNKNOWN, f"{who}, which records do not tell apart", [], call.site
    began = f"all ranks have begun {in_words(call)}"
    age_s = case.age_s(call.entered_s)
    sentence = f"slow, not stuck: {began}, which has gone on for {seconds(age_s)}"
    return Kind.SLOW, sentence, [], call.site


def _unseen(case: _Case) -> Found:
    """Report a cause that is not on this machine, has just left, or is unknown."""
    known = {each.records.rank for each in case.seen.job.ranks}
    gone = known - {each.rank for each in case.seen.ranks}
    ranks = sorted(case.ends)
    if ranks and case.ends <= gone:
        return Kind.DEAD, _obituary(case, ranks), ranks, ""
    if ranks:
        named = [rank for rank in ranks if rank != UNSEEN]
        sentence = f"{names(ranks)} cannot be seen from here{_unanswered(case)}"
        return Kind.UNKNOWN, sentence + case.those_who_wait(ranks), named, ""
    return Kind.UNKNOWN, "nothing that could be seen says why the job stands still", [], ""


_RULES: tuple[Callable[[_Case], Found | None], ...] = (
    _other_call,
    _other_order,
    _given_up,
    _dead,
    _stopped,
    _slow,
    _busy_elsewhere,
    _unreachable,
    _in_progress,
    _unseen,
)
