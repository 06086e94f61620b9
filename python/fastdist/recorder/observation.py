"""Looks twice at the ranks of a job, a moment apart."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from fastdist.recorder.encoding import read
from fastdist.recorder.endings import Ending
from fastdist.recorder.frames import Stack
from fastdist.recorder.jobs import Job, RecordedRank
from fastdist.recorder.machines import Machine
from fastdist.recorder.place import RecordPath
from fastdist.recorder.questions import NoAnswerError
from fastdist.recorder.ring import Call, Records, UnreadableError, read_records
from fastdist.recorder.stacks import stacks_of
from fastdist.recorder.system import Connection, Process, Thread, is_in_interpreter, look_at

INTERVAL_S = 0.5
_JUST_S = 10.0  # that an import may take before a failure is explained
_AWAKE_SHARE = 0.2  # of a core, used by a thread that does not sleep
# A thread that wants the GIL wakes every 5 ms to ask for it, later on a busy machine.
_GIL_NAPS_PER_S = (20, 260)


@dataclass(frozen=True, slots=True)
class ObservedRank:
    """A rank at two moments.

    Attributes:
        before: its records at the first moment.
        process: the process at the second moment; None if it is in another container.
        earlier: the process at the first moment.
        starved: the ids of the threads that wait for the GIL in vain.
        stacks: the stacks of its threads; empty if they were not asked for or could not be seen.
        machine: the launcher that reported it; "" if the rank is on this machine.
    """

    place: RecordPath
    records: Records
    before: Records
    process: Process | None
    earlier: Process | None
    ending: Ending | None
    starved: tuple[int, ...] = ()
    stacks: tuple[Stack, ...] = ()
    machine: str = ""

    @property
    def rank(self) -> int:
        """The rank in the job."""
        return self.records.rank

    @property
    def is_dead(self) -> bool:
        """True if the process has ended."""
        return self.process is not None and self.process.is_dead

    @property
    def stopped_by(self) -> str:
        """A signal, a debugger or a frozen container that has stopped the process; "" if none."""
        return self.process.stopped_by if self.process else ""

    @property
    def last_call(self) -> Call | None:
        """The call that began last."""
        return self.records.calls[-1] if self.records.calls else None

    @property
    def gave_up(self) -> Call | None:
        """The call that has just failed, whose error is about to be raised."""
        call = self.last_call
        if call is None or call.done_s is None or not call.is_failed or self.process is None:
            return None
        return call if self.process.at_s - call.done_s < _JUST_S else None

    @property
    def running(self) -> tuple[Call, ...]:
        """The calls that have not ended."""
        return tuple(call for call in self.records.calls if call.is_running)

    @property
    def waiting(self) -> list[Call]:
        """The calls that had not ended at either moment."""
        before = {call.number for call in self.before.calls if call.is_running}
        return [call for call in self.running if call.number in before]

    @property
    def has_advanced(self) -> bool:
        """True if a call began, or ended well, between the two moments."""
        known = {call.number: call.done_s is None for call in self.before.calls}
        return any(
            known.get(call.number) != call.is_running and not call.is_failed
            for call in self.records.calls[-64:]
        )

    @property
    def idle_since_s(self) -> float:
        """The moment at which its last call ended, on the monotonic clock."""
        ends = (call.done_s for call in self.records.calls if call.done_s is not None)
        return max(ends, default=self.records.began_s)

    @property
    def stack(self) -> Stack | None:
        """The stack of the thread that makes the calls, mostly the main one; None if unseen."""
        main = next((stack for stack in self.stacks if stack.is_main), None)
        site = self.last_call.site if self.last_call else ""
        if main is not None and main.is_in(site):
            return main
        return next((stack for stack in self.stacks if stack.is_in(site)), main)

    @property
    def line(self) -> str:
        """The user's line that this thread is in; "" if unknown."""
        return self.stack.user_line if self.stack else ""

    @property
    def cpu_share(self) -> float:
        """Processor time of all threads between the two moments, per second."""
        return self._per_s(lambda process: process.cpu_s)

    @property
    def page_faults_per_s(self) -> float:
        """Pages that were read from the disk between the two moments, per second."""
        return self._per_s(lambda process: process.page_faults)

    @property
    def main_cpu_share(self) -> float:
        """Processor time of the main thread between the two moments, per second."""
        now, then = self.process, self.earlier
        if now is None or then is None or now.main is None or then.main is None:
            return 0.0
        return (now.main.cpu_s - then.main.cpu_s) / _passed_s(now, then)

    def _per_s(self, count: Callable[[Process], float]) -> float:
        now, then = self.process, self.earlier
        if now is None or then is None:
            return 0.0
        return (count(now) - count(then)) / _passed_s(now, then)

    @property
    def main_thread(self) -> Thread | None:
        """The main thread, as the kernel sees it, asleep if it sleeps at one of the moments.

        A request for its stack, perhaps by another program, wakes it for a moment.
        """
        now, then = (each.main if each else None for each in (self.process, self.earlier))
        is_awake = now is not None and not now.waits_in and self.main_cpu_share < _AWAKE_SHARE
        return then if is_awake and then is not None else now

    @property
    def worst_connection(self) -> Connection | None:
        """The connection with most retransmissions; None if there are none."""
        connections = self.process.connections if self.process else ()
        lossy = (each for each in connections if each.retransmissions)
        return max(lossy, key=lambda each: each.retransmissions, default=None)


@dataclass(frozen=True, slots=True)
class Observation:
    """A job at two moments, of which `at_s` is the second.

    Attributes:
        ranks: the ranks whose records could be read.
        missing: the other ranks of the job.
        notes: notes of what could not be seen.
        unreached: the machines of the job that did not answer, and why.
    """

    job: Job
    ranks: tuple[ObservedRank, ...]
    missing: tuple[int, ...]
    at_s: float
    notes: tuple[str, ...]
    unreached: tuple[tuple[Machine, NoAnswerError], ...] = ()

    def rank(self, number: int) -> ObservedRank | None:
        """Return a rank; None if its records are not here."""
        return next((each for each in self.ranks if each.rank == number), None)

    @property
    def is_of_one_machine(self) -> bool:
        """True if all ranks of the job are on this machine."""
        worlds = [each.records.members[0] for each in self.ranks if each.records.members]
        return all(each.engine == "host" and each.size == self.job.world_size for each in worlds)


def observe(job: Job, interval_s: float = INTERVAL_S) -> Observation:
    """Look at the ranks of a job that are on this machine, twice."""
    notes: list[str] = []
    first = [_look(each, []) for each in job.ranks]
    if any(look and not (look[1] and look[1].is_dead) for look in first):
        time.sleep(interval_s)
    ranks = []
    for each, then in zip(job.ranks, first, strict=True):
        now = _look(each, notes)
        if then is None or now is None:
            continue
        (records, process), (before, earlier) = now, then
        ending = read(Ending, each.place.beside("ending"))
        starved = _starved(process, earlier) if process and earlier else ()
        ranks.append(
            ObservedRank(each.place, records, before, process, earlier, ending, tuple(starved))
        )
    return Observation(job, tuple(ranks), _missing(job, ranks), time.monotonic(), tuple(notes))


def _look(rank: RecordedRank, notes: list[str]) -> tuple[Records, Process | None] | None:
    """Look at a rank; None if its records are gone."""
    try:
        records = read_records(rank.place.path)
    except UnreadableError as error:
        notes.append(str(error))
        records = rank.records
    if records is None:
        return None
    if not rank.place.is_here:
        if not rank.is_live:
            return records, Process(records.pid, "", time.monotonic())
        notes.append(f"the process of rank {records.rank}, which is in another container")
        return records, None
    process = look_at(records.pid, records.started)
    notes += [f"rank {records.rank}: {note}" for note in process.notes]
    return records, process


def _starved(now: Process, before: Process) -> Iterator[int]:
    """Yield the threads that have woken often without success to ask for the GIL."""
    earlier = {thread.tid: thread for thread in before.threads}
    least, most = _GIL_NAPS_PER_S
    for thread in now.threads:
        then = earlier.get(thread.tid, thread)
        if least < (thread.switches - then.switches) / _passed_s(now, before) < most:
            addresses = {thread.futex, then.futex} - {0}  # it may just be awake
            if any(is_in_interpreter(now.pid, address) for address in addresses):
                yield thread.tid


def _passed_s(now: Process, before: Process) -> float:
    return max(now.at_s - before.at_s, 0.01)


def _missing(job: Job, ranks: Sequence[ObservedRank]) -> tuple[int, ...]:
    """Return the ranks that are neither these processes nor threads of them."""
    seen = {each.rank for each in ranks}
    for each in ranks:
        world = each.records.members[:1]
        seen |= {m.rank for m in each.records.members if world and m.key == world[0].key}
    return tuple(sorted(set(range(job.world_size)) - seen))


def with_stacks(observation: Observation, may_signal: bool) -> Observation:
    """Add the stacks of this machine's ranks that can answer."""
    asked = {
        each.process.pid: each.place
        for each in observation.ranks
        if each.process is not None and not (each.machine or each.is_dead or each.stopped_by)
    }
    found, missing = stacks_of(asked, may_signal)
    ranks = tuple(
        each if each.machine else replace(each, stacks=tuple(found.get(each.records.pid, ())))
        for each in observation.ranks
    )
    notes = [
        f"Python's stack of rank {each.rank}: {missing[each.records.pid]}"
        for each in ranks
        if each.records.pid in missing and not each.machine
    ]
    return replace(observation, ranks=ranks, notes=(*observation.notes, *notes))
