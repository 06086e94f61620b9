"""Looks twice at the ranks of a job, a moment apart."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from fastdist.recorder.endings import Ending, read_ending
from fastdist.recorder.frames import Stack
from fastdist.recorder.jobs import Job, RecordedRank
from fastdist.recorder.place import RecordPath
from fastdist.recorder.ring import Call, Records, UnreadableError, read_records
from fastdist.recorder.stacks import stacks_of
from fastdist.recorder.system import Process, Thread, look_at

INTERVAL_S = 0.5
_JUST_S = 2.0  # an error is told within that time


@dataclass(frozen=True, slots=True)
class ObservedRank:
    """A rank at two moments.

    Attributes:
        records: at the second moment.
        before: at the first moment.
        process: at the second moment; None if it is in another container.
        earlier: the process at the first moment.
        ending: the exception that ended it, if that is known.
        stacks: of its threads; empty if they were not asked for or could not be seen.
    """

    place: RecordPath
    records: Records
    before: Records
    process: Process | None
    earlier: Process | None
    ending: Ending | None
    stacks: tuple[Stack, ...] = ()

    @property
    def rank(self) -> int:
        """The rank in the job."""
        return self.records.rank

    @property
    def is_dead(self) -> bool:
        """True if the process has ended."""
        return self.process is not None and self.process.is_dead

    @property
    def is_stopped(self) -> bool:
        """True if a signal or a debugger has stopped the process."""
        return self.process is not None and self.process.is_stopped

    @property
    def last_call(self) -> Call | None:
        """The call that began last."""
        return self.records.calls[-1] if self.records.calls else None

    @property
    def gave_up(self) -> Call | None:
        """The call that it has just given up, as errors of calls are about to be told."""
        call = self.last_call
        if call is None or call.done_s is None or not call.is_failed or self.process is None:
            return None
        return call if self.process.at_s - call.done_s < _JUST_S else None

    @property
    def running(self) -> tuple[Call, ...]:
        """The calls that have not ended."""
        return tuple(call for call in self.records.calls if call.is_running)

    @property
    def has_advanced(self) -> bool:
        """True if a call began or ended between the two moments."""
        known = {call.number: call.done_s is None for call in self.before.calls}
        return any(known.get(call.number) != call.is_running for call in self.records.calls[-64:])

    @property
    def idle_since_s(self) -> float:
        """When its last call ended, on the monotonic clock."""
        ends = (call.done_s for call in self.records.calls if call.done_s is not None)
        return max(ends, default=self.records.began_s)

    @property
    def main_stack(self) -> Stack | None:
        """The stack of the main thread; None if it could not be seen."""
        return next((stack for stack in self.stacks if stack.is_main), None)

    @property
    def line(self) -> str:
        """The user's line that its main thread is in; "" if unknown."""
        return self.main_stack.user_line if self.main_stack else ""

    @property
    def cpu_share(self) -> float:
        """Processor time of all threads between the two moments, per second."""
        if self.process is None or self.earlier is None:
            return 0.0
        return (self.process.cpu_s - self.earlier.cpu_s) / self._passed_s

    @property
    def main_cpu_share(self) -> float:
        """Processor time of the main thread between the two moments, per second."""
        now, then = self.main_thread, self.earlier.main if self.earlier else None
        return (now.cpu_s - then.cpu_s) / self._passed_s if now and then else 0.0

    @property
    def main_thread(self) -> Thread | None:
        """The main thread, as the kernel sees it."""
        return self.process.main if self.process else None

    @property
    def page_faults_per_s(self) -> float:
        """Pages that were read from the disk between the two moments, per second."""
        if self.process is None or self.earlier is None:
            return 0.0
        return (self.process.page_faults - self.earlier.page_faults) / self._passed_s

    def thread_before(self, thread: Thread) -> Thread:
        """Return a thread at the first moment; as it is now if it did not exist."""
        threads = self.earlier.threads if self.earlier else ()
        return next((then for then in threads if then.tid == thread.tid), thread)

    def naps_per_s(self, thread: Thread) -> float:
        """How often a thread went to sleep between the two moments, per second."""
        return (thread.switches - self.thread_before(thread).switches) / self._passed_s

    @property
    def _passed_s(self) -> float:
        assert self.process is not None
        assert self.earlier is not None
        return max(self.process.at_s - self.earlier.at_s, 0.01)


@dataclass(frozen=True, slots=True)
class Observation:
    """A job at two moments.

    Attributes:
        ranks: those whose records are here.
        missing: ranks of the job without records here.
        at_s: the second moment, on the monotonic clock.
        notes: what could not be seen.
    """

    job: Job
    ranks: tuple[ObservedRank, ...]
    missing: tuple[int, ...]
    at_s: float
    notes: tuple[str, ...]

    def rank(self, number: int) -> ObservedRank | None:
        """Return a rank; None if its records are not here."""
        return next((each for each in self.ranks if each.rank == number), None)

    @property
    def is_of_one_machine(self) -> bool:
        """True if all ranks of the job are on this machine."""
        worlds = [each.records.members[0] for each in self.ranks if each.records.members]
        return all(each.engine == "host" and each.size == self.job.world_size for each in worlds)


def observe(job: Job, interval_s: float = INTERVAL_S) -> Observation:
    """Look at a job twice."""
    notes: list[str] = []
    first = [_look(each, []) for each in job.ranks]
    if any(look is not None and not look.is_dead for look in first):
        time.sleep(interval_s)
    ranks = []
    for each, before in zip(job.ranks, first, strict=True):
        now = _look(each, notes)
        if before is not None and now is not None:
            ending = read_ending(each.place.ending)
            pair = now.records, before.records, now.process, before.process
            ranks.append(ObservedRank(each.place, *pair, ending))
    return Observation(job, tuple(ranks), _missing(job, ranks), time.monotonic(), tuple(notes))


def _missing(job: Job, ranks: Sequence[ObservedRank]) -> tuple[int, ...]:
    """Return the ranks that are neither these processes nor threads of them."""
    seen = {each.rank for each in ranks}
    for each in ranks:
        world = each.records.members[:1]
        seen |= {m.rank for m in each.records.members if world and m.key == world[0].key}
    return tuple(sorted(set(range(job.world_size)) - seen))


def with_stacks(observation: Observation) -> Observation:
    """Add the stacks of the ranks that can answer."""
    asked = {
        each.process.pid: each.place.stacks
        for each in observation.ranks
        if each.process is not None and not each.is_dead and not each.is_stopped
    }
    found, missing = stacks_of(asked)
    ranks = tuple(
        replace(each, stacks=tuple(found.get(each.records.pid, ()))) for each in observation.ranks
    )
    notes = [
        f"Python's stack of rank {each.rank}: {missing[each.records.pid]}"
        for each in ranks
        if each.records.pid in missing
    ]
    return replace(observation, ranks=ranks, notes=(*observation.notes, *notes))


@dataclass(frozen=True, slots=True)
class _Look:
    """A rank at one moment."""

    records: Records
    process: Process | None

    @property
    def is_dead(self) -> bool:
        return self.process is not None and self.process.is_dead


def _look(rank: RecordedRank, notes: list[str]) -> _Look | None:
    """Look at a rank; None if its records are gone."""
    try:
        records = read_records(rank.place.path)
    except UnreadableError as error:
        notes.append(str(error))
        records = rank.records
    if records is None:
        return None
    if not rank.place.is_here:
        notes.append(f"the process of rank {records.rank}, which is in another container")
        return _Look(records, None)
    process = look_at(records.pid, records.started)
    notes += [f"rank {records.rank}: {note}" for note in process.notes]
    return _Look(records, process)
