"""Finds which rank waits for which, by call numbers, which all ranks of a communicator share.

A rank waits for the ranks of its communicator that have not begun the call that it is in. These may
wait themselves, in a call of another communicator; the ranks at the ends of such chains are the
cause. A chain without an end is a circle of waiting ranks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fastdist.recorder.observation import ObservedRank
from fastdist.recorder.ring import Call

UNSEEN = -1
"""Stands for a rank whose records are not here, and whose number is not known."""


@dataclass(frozen=True, slots=True)
class Wait:
    """A call that has not ended, or in which its rank did, and the ranks that have not begun it."""

    rank: int
    call: Call
    behind: frozenset[int]


def waits_of(ranks: Sequence[ObservedRank], missing: Sequence[int]) -> list[Wait]:
    """Find out which rank waits for which; `missing`: the ranks whose records are not here."""
    table = _Progress(ranks, missing)
    return [
        Wait(each.rank, call, table.behind(each, call)) for each in ranks for call in _waiting(each)
    ]


def _waiting(rank: ObservedRank) -> Sequence[Call]:
    """Return the calls in which a rank has waited at both moments, or which it has given up."""
    if not rank.is_dead:
        return rank.waiting if rank.gave_up is None else [*rank.waiting, rank.gave_up]
    last = rank.last_call
    return [last] if last is not None and (last.is_failed or last.is_running) else []


class _Progress:
    """The last call of each rank in each communicator."""

    def __init__(self, ranks: Sequence[ObservedRank], missing: Sequence[int]) -> None:
        self._missing = missing
        self._world_size = max((each.records.world_size for each in ranks), default=0)
        # By key, the job's ranks by the communicator's.
        self._ranks: dict[int, dict[int, int]] = defaultdict(dict)
        # The last collective, by key and the job's rank.
        self._last: dict[tuple[int, int], int] = defaultdict(int)
        # The sends and receives that run, by key, the job's rank, and the other's in the lane.
        self._in_lane: dict[tuple[int, int, int], list[Call]] = defaultdict(list)
        for each in ranks:
            for member in each.records.members:
                self._ranks[member.key][member.rank] = each.rank
            for call in (*each.before.calls, *each.records.calls):
                key = call.member.key
                if not call.signature.is_pairwise:
                    self._last[key, each.rank] = max(self._last[key, each.rank], call.sequence)
                elif call.is_running:
                    self._in_lane[key, each.rank, call.signature.root].append(call)

    def behind(self, rank: ObservedRank, call: Call) -> frozenset[int]:
        """Return the ranks that have not begun a call."""
        if call.signature.is_pairwise:
            return self._behind_in_lane(call)
        key = call.member.key
        others = {self._job_rank(call, each) for each in range(call.member.size)} - {rank.rank}
        return frozenset(
            each for each in others if each == UNSEEN or self._last[key, each] < call.sequence
        )

    def _behind_in_lane(self, call: Call) -> frozenset[int]:
        """Return the other rank of a send or receive, unless it is in the opposite call."""
        if call.signature.root < 0:
            return frozenset()  # from any rank
        key, other = call.member.key, self._job_rank(call, call.signature.root)
        opposite = {"send": "recv", "recv": "send"}[call.signature.op]
        theirs = self._in_lane[key, other, call.member.rank]
        has_come = any(each.signature.op == opposite for each in theirs)
        return frozenset() if has_come else frozenset([other])

    def _job_rank(self, call: Call, rank: int) -> int:
        known = self._ranks[call.member.key]
        if rank in known:
            return known[rank]
        has_same_ranks = all(a == b for a, b in known.items())
        if rank in self._missing and call.member.size == self._world_size and has_same_ranks:
            return rank
        return self._missing[0] if len(self._missing) == 1 else UNSEEN


def causes(waits: Sequence[Wait], present: frozenset[int]) -> tuple[frozenset[int], list[int]]:
    """Follow chains of waiting ranks to their ends, or find a circle of ranks, if there is one.

    The ranks in `present` run code outside of calls: they are ends even if one of their
    asynchronous calls has not ended.
    """
    edges: dict[int, set[int]] = defaultdict(set)
    for wait in waits:
        edges[wait.rank] |= wait.behind
    targets = {each for behind in edges.values() for each in behind}
    ends = frozenset(each for each in targets if each in present or not edges.get(each))
    return ends, [] if ends else _circle(edges)


def _circle(edges: Mapping[int, set[int]]) -> list[int]:
    for start in sorted(edges):
        path = [start]
        while edges.get(path[-1]):
            following = min(edges[path[-1]])
            if following in path:
                return path[path.index(following) :]
            path.append(following)
    return []
