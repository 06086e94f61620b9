"""The tasks of a job, and a process for each task."""

import enum
import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass

from fastdist.cli.output import Stream
from fastdist.replicas.processes import signal_name

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
        name: the task in messages: "rank 1", "worker 1".
        label: the task in brackets at the beginning of each line of its output.
        environment: the complete environment of the process.
        ending: the effect of the process's end.
        command: its program and arguments, if they are not the job's. Its stdin stays open until
            the launcher ends.
        stdin: bytes that its own command finds in stdin.
    """

    name: str
    label: str
    environment: Mapping[str, str]
    ending: Ending = Ending.ONE_OF_ALL
    command: Sequence[str] | None = None
    stdin: bytes = b""


@dataclass(frozen=True, slots=True)
class Job:
    """The processes that a launcher runs.

    Attributes:
        command: the program and its arguments, the same for every task.
        tasks: the tasks on this machine; the first task reads the launcher's stdin.
        size: number of tasks on all machines.
        max_restarts: maximum number of restarts, over all tasks.
        grace_s: seconds that processes have to end after a signal, until they are killed.
        prefix: begin each line of output with the label of its task.
        colour: colour the labels on a terminal.
        ends_with_stdin: stop the job when the launcher's stdin ends; no task reads it.
    """

    command: Sequence[str]
    tasks: Sequence[Task]
    size: int
    max_restarts: int = 0
    grace_s: float = GRACE_S
    prefix: bool = True
    colour: bool = True
    ends_with_stdin: bool = False


class StartError(Exception):
    """A process of a job could not be started."""


@dataclass(slots=True, eq=False)
class Process:
    """The running or ended process of a task."""

    task: Task
    number: int
    popen: "subprocess.Popen[bytes]"
    stdout: Stream
    stderr: Stream
    status: int | None = None
    """Exit code, or minus the number of the signal that killed the process; None while it runs."""

    @property
    def exit_code(self) -> int:
        """The exit code that a shell reports: 128 + signal for a killed process."""
        assert self.status is not None
        return self.status if self.status >= 0 else 128 - self.status

    @property
    def how_it_ended(self) -> str:
        """The exit code or the signal, in words."""
        assert self.status is not None
        if self.status >= 0:
            return f"exit code {self.status}"
        return f"killed by signal {signal_name(-self.status)}"

    def has_ended(self) -> bool:
        """Returns True once, when the process has ended; sets `status` and leaves a zombie."""
        if self.status is not None:
            return False
        ended = os.waitid(os.P_PID, self.popen.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is None:
            return False
        self.status = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
        return True

    def signal_group(self, number: signal.Signals) -> None:
        """Sends a signal to the process group."""
        if self.popen.returncode is not None:  # reaped: another process may have the number
            return
        # No such process: all have ended. No permission: another user owns the processes left.
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.popen.pid, number)

    def is_alive_in(self, live_groups: Set[int]) -> bool:
        """Returns True if a process of the group still runs."""
        return self.popen.returncode is None and self.popen.pid in live_groups

    def reap(self) -> None:
        """Waits for the end of the process and closes its pipes."""
        with self.popen:
            self.popen.wait()


def start(
    job: Job, number: int, die_with_parent: Callable[[], None]
) -> "tuple[subprocess.Popen[bytes], int, int]":
    """Starts a task of a job, as the leader of a session.

    Returns:
        The process, and the descriptors of its stdout and stderr.

    Raises:
        StartError: the process could not be started.
    """
    task = job.tasks[number]
    command = task.command or job.command
    stdin: int | None = subprocess.DEVNULL
    if task.command is not None:
        stdin = subprocess.PIPE
    elif number == 0 and not job.ends_with_stdin:
        stdin = None
    try:
        popen = subprocess.Popen(
            command,
            env=task.environment,
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )
    except (OSError, subprocess.SubprocessError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise StartError(f"cannot start {task.name}: {command[0]}: {reason}") from error
    assert popen.stdout is not None
    assert popen.stderr is not None
    if popen.stdin is not None:
        with suppress(BrokenPipeError):  # it has ended already, and says why
            popen.stdin.write(task.stdin)
    return popen, popen.stdout.fileno(), popen.stderr.fileno()
