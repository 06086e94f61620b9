"""The tasks of a job."""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

GRACE_S = 5.0  # seconds between a signal and SIGKILL


class Ending(enum.Enum):
    """The effect of a process's end on its job."""

    ONE_OF_ALL = enum.auto()
    """The job ends when all processes have ended, or when one has failed."""
    ENDS_JOB = enum.auto()
    """The job ends, with the exit code of this process."""
    RESTARTED = enum.auto()
    """The job continues; the process is restarted if it failed, up to `Job.max_restarts` times."""


@dataclass(frozen=True, slots=True)
class Task:
    """One process of a job."""

    name: str  # in messages: "worker 1"
    label: str  # in brackets at the beginning of each line of its output
    environment: Mapping[str, str]
    ending: Ending = Ending.ONE_OF_ALL
    command: Sequence[str] | None = None  # if not the job's; its stdin is open until the job ends
    stdin: bytes = b""  # what its own command finds in stdin
    restart_delay_s: float = 0.2
    final_codes: Collection[int] = ()  # exit codes after which it is not restarted


@dataclass(frozen=True, slots=True)
class Elastic:
    """Restarted tasks that do the job together. Once one has ended well, none is restarted."""

    least: int  # the job fails when fewer tasks are left
    # True once the tasks work together; before, a task that fails with an exit code ends the job.
    has_begun: Callable[[], bool]
    finish: Callable[[], None]  # to call when a task has succeeded


@dataclass(frozen=True, slots=True)
class Job:
    """The processes that a launcher runs."""

    command: Sequence[str]
    tasks: Sequence[Task]  # on this machine; the first one reads the launcher's stdin
    size: int  # number of tasks on all machines
    max_restarts: int = 0  # over all tasks
    elastic: Elastic | None = None  # None: restarted tasks are helpers of another, not peers
    grace_s: float = GRACE_S  # that processes have to end after a signal, until they are killed
    prefix: bool = True  # begin each line of output with the label of its task
    ends_with_stdin: bool = False  # when the launcher's stdin ends; no task reads it
