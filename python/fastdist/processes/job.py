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
    """One process of a job.

    Attributes:
        name: the task in messages: "worker 1".
        label: the task in brackets at the beginning of each line of its output.
        ending: the effect of the process's end.
        command: its program and arguments, if they are not the job's. Its stdin stays open until
            the launcher ends.
        stdin: bytes that its own command finds in stdin.
        restart_delay_s: seconds until it is restarted.
        final_codes: exit codes after which it is not restarted.
    """

    name: str
    label: str
    environment: Mapping[str, str]
    ending: Ending = Ending.ONE_OF_ALL
    command: Sequence[str] | None = None
    stdin: bytes = b""
    restart_delay_s: float = 0.2
    final_codes: Collection[int] = ()


@dataclass(frozen=True, slots=True)
class Elastic:
    """Restarted tasks that do the job together. Once one has ended well, none is restarted.

    Attributes:
        least: the job fails when fewer tasks are left.
        has_begun: a function that returns True once the tasks work together; before, a task that
            fails with an exit code ends the job.
        finish: a function to call when a task has succeeded.
    """

    least: int
    has_begun: Callable[[], bool]
    finish: Callable[[], None]


@dataclass(frozen=True, slots=True)
class Job:
    """The processes that a launcher runs.

    Attributes:
        launcher: the launcher in messages: "fastdist run".
        command: the program and its arguments, the same for every task.
        tasks: the tasks on this machine; the first task reads the launcher's stdin.
        size: number of tasks on all machines.
        max_restarts: maximum number of restarts, over all tasks.
        elastic: the description of restarted tasks that are peers of each other. None: they are
            helpers of another task.
        grace_s: seconds that processes have to end after a signal, until they are killed.
        prefix: begin each line of output with the label of its task.
        colour: colour the labels on a terminal.
        ends_with_stdin: stop the job when the launcher's stdin ends; no task reads it.
    """

    launcher: str
    command: Sequence[str]
    tasks: Sequence[Task]
    size: int
    max_restarts: int = 0
    elastic: Elastic | None = None
    grace_s: float = GRACE_S
    prefix: bool = True
    colour: bool = True
    ends_with_stdin: bool = False
