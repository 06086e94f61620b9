"""Finds this user's jobs on this machine by the records of their processes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from fastdist.recorder.place import RecordPath, record_paths, unusable_folders
from fastdist.recorder.ring import Records, UnreadableError, identity, read_records
from fastdist.recorder.system import start_of, state_of


class NoSuchJobError(LookupError):
    """No job was found; the message says why."""


@dataclass(frozen=True, slots=True)
class RecordedRank:
    """A rank and its records."""

    place: RecordPath
    records: Records

    @property
    def is_live(self) -> bool:
        """True if the process runs or is stopped."""
        if not self.place.is_here:
            return self.place.is_locked
        return start_of(self.records.pid) == self.records.started

    @property
    def can_speak(self) -> bool:
        """True if the process is on this machine, and is neither dead nor stopped."""
        return self.place.is_here and self.is_live and state_of(self.records.pid) not in "TtZX"

    @property
    def last_s(self) -> float:
        """The moment at which the process last did something, on the monotonic clock."""
        calls = self.records.calls
        last = max((each.end_s for each in calls[-16:]), default=0.0)
        return max(self.records.began_s, self.records.phase_since_s, last)


@dataclass(frozen=True, slots=True)
class Job:
    """A job on this machine, its ranks in order; a rank that was started again counts once."""

    id: str
    ranks: tuple[RecordedRank, ...]

    @property
    def world_size(self) -> int:
        """The number of ranks, on all machines."""
        return max(each.records.world_size for each in self.ranks)

    @property
    def is_live(self) -> bool:
        """True if a rank runs."""
        return any(each.is_live for each in self.ranks)

    @property
    def began_s(self) -> float:
        """The moment at which its youngest rank began, on the monotonic clock."""
        return max(each.records.began_s for each in self.ranks)


def job_of(pid: int) -> Job:
    """Find the job of a process, alive or dead; read no records but those of the job."""
    here = (each for each in record_paths() if each.is_here and each.pid == pid)
    found = [who for each in here if (who := identity(each.path)) is not None]
    # An earlier process may have had the same number.
    last = max(found, key=lambda who: who.started, default=None)
    return find_job(jobs_here(last.job)[0] if last else [], str(pid))


def jobs_here(only: str | None = None) -> tuple[list[Job], list[str]]:
    """Find the jobs with records, dead ones too, or the one with the id `only`.

    Live ones come first, then the youngest. The notes tell what was unreadable.
    """
    ranks: dict[str, dict[int, RecordedRank]] = {}
    notes = []
    for place in record_paths():
        if only is not None and ((who := identity(place.path)) is None or who.job != only):
            continue
        try:
            records = read_records(place.path)
        except UnreadableError as error:
            if place.is_locked or (place.is_here and start_of(place.pid) is not None):
                notes.append(str(error))
            continue
        if records is None:
            continue
        own = ranks.setdefault(records.job, {})
        known = own.get(records.rank)
        if known is None or known.records.began_s < records.began_s:
            own[records.rank] = RecordedRank(place, records)
    jobs = [Job(id, tuple(own[rank] for rank in sorted(own))) for id, own in ranks.items()]
    return sorted(jobs, key=lambda job: (not job.is_live, -job.began_s)), sorted(set(notes))


def find_job(jobs: Iterable[Job], name: str | None) -> Job:
    """Find a job by its id, by the beginning of its id, or by a rank's process; None: the first."""
    jobs = list(jobs)
    if name is None:
        if not jobs:
            taken = "".join(f"; {each}" for each in unusable_folders())
            raise NoSuchJobError(
                "no job of this user has records here; ranks keep them once they are connected"
                + taken
            )
        return jobs[0]
    if name.isdecimal():
        for job in jobs:
            if any(each.place.is_here and each.records.pid == int(name) for each in job.ranks):
                return job
    fitting = [job for job in jobs if job.id.startswith(name.lower())]
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        raise NoSuchJobError(f"{name} begins the ids of {len(fitting)} jobs; see fastdist ps")
    raise NoSuchJobError(
        f"no job of this user, or process that records its calls, is named {name}; see fastdist ps"
    )
