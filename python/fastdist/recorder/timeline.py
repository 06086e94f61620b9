"""Timelines of ranks: their phases and calls on one clock, and which rank waited for which."""

from __future__ import annotations

import itertools
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from fastdist.recorder.ring import Call


@dataclass(frozen=True, slots=True)
class Span:
    """A phase of a rank. Times are in seconds of the timeline's clock."""

    phase: str
    begin_s: float
    end_s: float


def traced(call: Call, epoch_s: float = 0.0) -> Call:
    """Move a call to the clock on which the monotonic one began at `epoch_s`.

    A call that has not ended counts as failed.
    """
    if call.is_running:
        now_s = time.monotonic()
        call = replace(call, there_s=now_s, done_s=now_s, is_failed=True)
    return call.later(epoch_s)


@dataclass(slots=True)
class RankTimeline:
    """The phases and calls of one rank; `lost_calls` were overwritten before they were read."""

    rank: int
    label: str
    spans: list[Span] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    lost_calls: int = 0

    def steps_s(self) -> list[float]:
        """Return the seconds of each step, from the beginning of one forward pass to the next."""
        begins = []
        before = ""
        for span in self.spans:
            # Backward and the optimizer's step interrupt the forward phase of the same run.
            if span.phase == "forward" and before in ("", "user", "data", "saving"):
                begins.append(span.begin_s)
            before = span.phase
        return [end - begin for begin, end in itertools.pairwise(begins)]

    def phases_s(self) -> dict[str, float]:
        """Return the seconds of each phase, with the time that its calls waited for other ranks."""
        sums: dict[str, float] = defaultdict(float)
        for span in self.spans:
            sums[span.phase] += span.end_s - span.begin_s
        return dict(sums)

    def waiting_s(self) -> float:
        """Return the seconds for which collectives waited until all ranks had announced them."""
        return sum(call.there_s - call.entered_s for call in self.calls if call.is_collective)


@dataclass(frozen=True, slots=True)
class Lateness:
    """A rank that arrived last, and the cost for the others.

    Attributes:
        count: the number of collectives that waited for it.
        share: its share of the collectives in which any rank was waited for.
        cost_s: mean seconds that the other ranks waited for it, per such collective.
        reason: its main occupation meanwhile: a phase, or "user".
    """

    rank: int
    count: int
    share: float
    cost_s: float
    reason: str
    site: str

    @property
    def how_often(self) -> str:
        """Return "rank 1 was last in 90% of 40 collectives that waited, by 12 ms each"."""
        return (
            f"rank {self.rank} was last in {self.share:.0%} of {round(self.count / self.share)} "
            f"collectives that waited, by {1e3 * self.cost_s:.3g} ms each"
        )

    def __str__(self) -> str:
        doing = _DOING.get(self.reason, f"in {self.reason}")
        return f"{self.how_often}, {doing}" + (f" ({self.site})" if self.site else "")


_DOING = {"data": "waiting for data", "user": "in user code", "saving": "saving a checkpoint"}


def find_late(ranks: Sequence[RankTimeline], least_s: float = 1e-4) -> list[Lateness]:
    """Return the ranks that others waited for at least `least_s`, the most expensive one first.

    Several ranks may have the same number, one after the other.
    """
    waits: dict[int, list[float]] = defaultdict(list)
    reasons: dict[int, Counter[str]] = defaultdict(Counter)
    sites: dict[int, Counter[str]] = defaultdict(Counter)
    before_s = [_ends_before(timeline) for timeline in ranks]
    for calls in _collectives(ranks):
        last, call = max(calls, key=lambda each: each[1].entered_s)
        others = [call.entered_s - each.entered_s for place, each in calls if place != last]
        cost_s = statistics.fmean(others)
        if cost_s < least_s:
            continue
        waits[last].append(cost_s)
        sites[last][call.site] += 1
        since_s = max(before_s[last][id(call)], call.entered_s - max(others))
        for span in ranks[last].spans:
            overlap_s = min(span.end_s, call.entered_s) - max(span.begin_s, since_s)
            if (overlap_us := int(1e6 * overlap_s)) > 0:
                reasons[last][span.phase] += overlap_us
    total = sum(map(len, waits.values()))
    late = [
        Lateness(
            ranks[place].rank,
            len(costs),
            len(costs) / total,
            statistics.fmean(costs),
            reasons[place].most_common(1)[0][0] if reasons[place] else "user",
            sites[place].most_common(1)[0][0],
        )
        for place, costs in waits.items()
    ]
    return sorted(late, key=lambda each: -each.cost_s * each.count)


def _ends_before(timeline: RankTimeline) -> dict[int, float]:
    """Return the time when all calls before each call of a rank had ended, by the call's `id`."""
    ends = {}
    latest_s = 0.0
    for call in sorted(timeline.calls, key=lambda each: each.entered_s):
        ends[id(call)] = latest_s
        latest_s = max(latest_s, call.end_s)
    return ends


def _collectives(ranks: Sequence[RankTimeline]) -> Iterator[list[tuple[int, Call]]]:
    """Yield the calls of each collective that all its ranks have recorded, with their places."""
    found: dict[tuple[int, int], list[tuple[int, Call]]] = defaultdict(list)
    for place, timeline in enumerate(ranks):
        for call in timeline.calls:
            if call.is_collective and not call.is_failed:
                found[call.place].append((place, call))
    for calls in found.values():
        # Not ranks that are threads.
        if len({place for place, _ in calls}) == calls[0][1].member.size > 1:
            yield calls


def align(ranks: Sequence[RankTimeline], reference: RankTimeline) -> None:
    """Move the ranks of another machine onto the clock of `reference`.

    All ranks of a collective notice the arrival of the last rank at the same moment, except for the
    network's latency.
    """
    theirs = {call.place: call.there_s for call in reference.calls if call.is_collective}
    for timeline in ranks:
        differences = [
            theirs[call.place] - call.there_s
            for call in timeline.calls
            if call.is_collective and call.place in theirs
        ]
        by_s = statistics.median(differences) if differences else 0.0
        timeline.spans = [
            Span(span.phase, span.begin_s + by_s, span.end_s + by_s) for span in timeline.spans
        ]
        timeline.calls = [call.later(by_s) for call in timeline.calls]
