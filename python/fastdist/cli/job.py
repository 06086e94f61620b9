"""What a launcher runs: the tasks of a job, and a process for each of them."""

import enum
import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass

from fastdist.cli.output import Stream
from fastdist.cli.processes import signal_name


class Ending(enum.Enum):
    """What it means for a job that one of its processes has ended."""

    ONE_OF_ALL = enum.auto()
    """The job ends when all have ended, or one has failed."""
    ENDS_JOB = enum.auto()
    """The job's success is its own, and nobody else's."""
    STARTED_AGAIN = enum.auto()
    """If it has failed, and a few times only; the job goes on either way."""


@dataclass(frozen=True, slots=True)
class Task:
    """One process of a job.

    Attributes:
        name: in messages: "rank 1", "worker 1".
        label: in brackets at the beginning of each line that it writes.
        environment: all of its environment.
        ending: what its end means.
    """

    name: str
    label: str
    environment: Mapping[str, str]
    ending: Ending = Ending.ONE_OF_ALL


@dataclass(frozen=True, slots=True)
class Job:
    """What to run.

    Attributes:
        command: the program and its arguments, the same for every task.
        tasks: the first one reads the launcher's stdin.
        max_restarts: how often tasks may be started again, all of them together.
        prefix: whether each line of output begins with the label of the task that wrote it.
        colour: whether that is coloured where it goes to a terminal.
    """

    command: Sequence[str]
    tasks: Sequence[Task]
    max_restarts: int = 0
    prefix: bool = True
    colour: bool = True


class StartError(Exception):
    """A process of a job could not be started."""


@dataclass(slots=True, eq=False)
class Process:
    """A task that has been started."""

    task: Task
    number: int
    popen: "subprocess.Popen[bytes]"
    stdout: Stream
    stderr: Stream
    status: int | None = None
    """Exit code, or minus the number of the signal that killed it; None while it runs."""

    @property
    def exit_code(self) -> int:
        """What a shell makes of its status."""
        assert self.status is not None
        return self.status if self.status >= 0 else 128 - self.status

    @property
    def how_it_ended(self) -> str:
        """In words."""
        assert self.status is not None
        if self.status >= 0:
            return f"exit code {self.status}"
        return f"killed by signal {signal_name(-self.status)}"

    def has_ended(self) -> bool:
        """Whether it has ended since the last time; leaves it a zombie, and notes the status."""
        if self.status is not None:
            return False
        ended = os.waitid(os.P_PID, self.popen.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is None:
            return False
        self.status = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
        return True

    def signal_group(self, number: signal.Signals) -> None:
        """Sends a signal to it and to what it has started."""
        if self.popen.returncode is not None:  # reaped: the number may be somebody else's by now
            return
        # No such process: all are gone. No permission: what is left belongs to another user.
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.popen.pid, number)

    def has_left(self, live_groups: Set[int]) -> bool:
        """Whether something that it has started, or itself, is in one of the live groups."""
        return self.popen.returncode is None and self.popen.pid in live_groups

    def reap(self) -> None:
        """Waits for its end and frees what it held."""
        with self.popen:
            self.popen.wait()


def start(
    job: Job, number: int, die_with_parent: Callable[[], None]
) -> "tuple[subprocess.Popen[bytes], int, int]":
    """Starts a task of a job, as the leader of a session.

    Returns:
        The process, and the descriptors of its stdout and stderr.

    Raises:
        StartError: it could not be started.
    """
    task = job.tasks[number]
    try:
        popen = subprocess.Popen(
            job.command,
            env=task.environment,
            stdin=None if number == 0 else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )
    except (OSError, subprocess.SubprocessError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise StartError(f"cannot start {task.name}: {job.command[0]}: {reason}") from error
    assert popen.stdout is not None
    assert popen.stderr is not None
    return popen, popen.stdout.fileno(), popen.stderr.fileno()
