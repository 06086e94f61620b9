"""Starts a process, and tells how it ended."""

import ctypes
import os
import re
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from fastdist.processes.output import Receiver, Stream, last_words

_PR_SET_PDEATHSIG = 1
_PEER_FAILURE = re.compile(rb"^[\w.]*PeerFailureError\b", re.M)


class StartError(Exception):
    """A process could not be started."""

    def __init__(self, name: str, program: str, reason: object) -> None:
        super().__init__(f"cannot start {name}: {program}: {reason}")
        self.reason = reason


@dataclass(slots=True, eq=False)
class Process:
    """A running or ended process."""

    name: str  # in messages: "worker 1"
    popen: "subprocess.Popen[bytes]"
    streams: Sequence[Stream]  # stdout and stderr, or both as one; empty if nobody reads its output
    # Its exit code, or minus the signal that killed it; None until `poll` has found its end.
    status: int | None = None

    def poll(self) -> int | None:
        """Set `status` if the process has ended, and return it; leave a zombie."""
        if self.status is None:
            try:
                ended = os.waitid(os.P_PID, self.popen.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:  # the zombie is gone
                self.status = self.popen.wait()
            else:
                if ended is not None:
                    has_exited = ended.si_code == os.CLD_EXITED
                    self.status = ended.si_status if has_exited else -ended.si_status
        return self.status

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

    @property
    def is_consequence(self) -> bool:
        """True if it failed with PeerFailureError, because another process had failed."""
        is_failure = self.status is not None and self.status > 0
        return is_failure and _PEER_FAILURE.search(last_words(self.streams[-1].tail)[1]) is not None

    def report(self) -> tuple[str, bytes]:
        """Return how it ended, as a line that introduces its last words, and these words."""
        kind, words = last_words(self.streams[-1].tail)
        if words.strip():
            return f"{self.how_it_ended}; its {kind}:", words
        where = " to stderr" if len(self.streams) > 1 else ""
        return f"{self.how_it_ended}; it wrote nothing{where}", b""

    def describe(self) -> str:
        """Describe how it ended, with its last words."""
        how, words = self.report()
        return f"{self.name}: {how}\n{words.decode(errors='replace')}".rstrip()

    def signal_group(self, number: signal.Signals) -> None:
        """Send a signal to the process group that this process leads; it must not be reaped."""
        # No such process: all have ended. No permission: another user owns the processes left.
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.popen.pid, number)

    def reap(self) -> None:
        """Wait for the end of the process, and close its pipes."""
        with self.popen:
            self.popen.wait()


def start(
    name: str,
    command: Sequence[str],
    environment: Mapping[str, str],
    receivers: Sequence[Receiver] = (),
    **options: Any,
) -> Process:
    """Start a process that the kernel kills when this thread ends.

    Args:
        receivers: functions that take its output: one each for stdout and stderr, or one for both.
        options: further arguments of `subprocess.Popen`. Without `stdin`, that is empty.
    """
    if receivers:
        stderr = subprocess.PIPE if len(receivers) > 1 else subprocess.STDOUT
        options |= {"stdout": subprocess.PIPE, "stderr": stderr}
    try:
        popen = subprocess.Popen(
            command,
            env=environment,
            bufsize=0,
            preexec_fn=_death_signal_setter(),
            **{"stdin": subprocess.DEVNULL, **options},
        )
    except (OSError, subprocess.SubprocessError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise StartError(name, command[0], reason) from error
    files = [file for file in (popen.stdout, popen.stderr) if file is not None]
    streams = [Stream(file.fileno(), r) for file, r in zip(files, receivers, strict=True)]
    return Process(name, popen, streams)


def _death_signal_setter() -> Callable[[], None]:
    """Return a function that a child calls before exec, so that it dies with this thread."""
    prctl = ctypes.CDLL(None).prctl
    arguments = [ctypes.c_ulong(value) for value in (signal.SIGKILL, 0, 0, 0)]
    parent = os.getpid()

    def die_with_parent() -> None:
        prctl(_PR_SET_PDEATHSIG, *arguments)
        if os.getppid() != parent:  # the parent died before the call
            os._exit(1)

    return die_with_parent


def signal_name(number: int) -> str:
    """Format a signal's number and, if it has one, its name: "9 (SIGKILL)"."""
    try:
        return f"{number} ({signal.Signals(number).name})"
    except ValueError:  # a real-time signal
        return str(number)
