"""Runs the ranks of a job as child processes, and ends all of them when one fails.

One loop in one thread waits for everything: the ranks' output, room in the launcher's own output,
and signals, which arrive as bytes in a pipe; SIGCHLD among them says that a rank has ended.

Every rank leads a process group of its own, in a session of its own, so that a terminal's Ctrl-C
reaches the launcher alone and a signal to the group reaches what the rank has started. A rank that
has ended stays a zombie until the launcher returns: this keeps the group's number from being used
for somebody else's processes.

To stop, the launcher signals all groups, and kills after a grace what is left. If it is killed
itself, the kernel kills the ranks.
"""

import os
import re
import selectors
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from fastdist.cli.output import Sink, Stream
from fastdist.cli.processes import death_signal_setter, live_groups, signal_name, signal_pipe

_GRACE_S = 5.0
_CAUSE_WAIT_S = 2.0
_SAME_KEY_PRESS_S = 0.25
_PROMPT_S = 0.1
_GROUP_POLL_S = 0.02
_MOST_READS_AT_END = 32
_COLOURS = (36, 33, 32, 35, 34, 31)
_PEER_FAILURE = re.compile(rb"^[\w.]*PeerFailureError\b", re.M)


@dataclass(frozen=True, slots=True)
class Job:
    """What to run.

    Attributes:
        command: the program and its arguments, the same for every rank.
        environments: the environment of each rank.
        prefix: whether each line of output begins with the rank that wrote it.
        colour: whether that is coloured where it goes to a terminal.
    """

    command: Sequence[str]
    environments: Sequence[Mapping[str, str]]
    prefix: bool = True
    colour: bool = True


class StartError(Exception):
    """A rank could not be started."""


@dataclass(slots=True)
class _Rank:
    number: int
    process: subprocess.Popen[bytes]
    stdout: Stream
    stderr: Stream
    status: int | None = None
    """Exit code, or minus the number of the signal that killed it; None while it runs."""

    @property
    def is_consequence(self) -> bool:
        """Whether it failed because another rank had failed, by what it says itself."""
        words = self.stderr.last_words()[1]
        return (self.status or 0) > 0 and _PEER_FAILURE.search(words) is not None


def supervise(job: Job) -> int:
    """Runs a job's ranks to their end.

    Output goes to this process's stdout and stderr, and rank 0 reads its stdin. Must be called in
    the main thread.

    Returns:
        0 when every rank has returned 0; the exit code of the rank that failed first, or 128 and
        the number of the signal that killed it; 128 and the number of the signal that stopped the
        launcher.

    Raises:
        StartError: a rank could not be started; none is left running.
    """
    with signal_pipe() as signals, selectors.PollSelector() as selector:
        supervisor = _Supervisor(job, signals, selector)
        try:
            supervisor.start()
            supervisor.wait()
            return supervisor.report()
        finally:
            supervisor.close()


class _Supervisor:
    def __init__(self, job: Job, signals: int, selector: selectors.BaseSelector) -> None:
        self._job = job
        self._signals = signals
        self._selector = selector
        self._ranks: list[_Rank] = []
        self._stdout = Sink(1)
        self._stderr = self._stdout if _is_same_file(1, 2) else Sink(2)
        self._stalled: set[Sink] = set()
        self._failed: list[_Rank] = []
        self._terminate_at_s: float | None = None
        self._stopped_at_s: float | None = None
        self._kill_at_s: float | None = None
        self._stopped_by: signal.Signals | None = None
        self._waits_for_readers = True
        selector.register(signals, selectors.EVENT_READ, self._on_signals)

    def start(self) -> None:
        die_with_parent = death_signal_setter()
        for number, environment in enumerate(self._job.environments):
            try:
                process = subprocess.Popen(
                    self._job.command,
                    env=environment,
                    stdin=None if number == 0 else subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    bufsize=0,
                    start_new_session=True,
                    preexec_fn=die_with_parent,
                )
            except (OSError, subprocess.SubprocessError) as error:
                reason = error.strerror if isinstance(error, OSError) else error
                program = self._job.command[0]
                raise StartError(f"cannot start rank {number}: {program}: {reason}") from error
            assert process.stdout is not None
            assert process.stderr is not None
            stdout = self._open_stream(process.stdout.fileno(), self._stdout, number)
            stderr = self._open_stream(process.stderr.fileno(), self._stderr, number)
            self._ranks.append(_Rank(number, process, stdout, stderr))

    def wait(self) -> None:
        """Returns when no rank, and nothing that one has started in its group, is left."""
        while any(rank.status is None for rank in self._ranks):
            self._turn()
        if self._has_strays() and self._stopped_at_s is None:
            self._stop(signal.SIGTERM)
        while self._has_strays():
            self._turn(_GROUP_POLL_S)
        if self._stopped_by is None:
            self._kill_at_s = None
        self._drain()

    def report(self) -> int:
        """Says how the job ended, as the last lines on stderr, and returns the exit code."""
        broken = self._stdout.error or self._stderr.error
        first = next((rank for rank in self._failed if not rank.is_consequence), None)
        first = first or next(iter(self._failed), None)
        if first is not None:
            exit_code = self._report_failure(first)
        elif self._stopped_by is not None:
            self._say(f"stopped by {self._stopped_by.name}")
            exit_code = 128 + self._stopped_by
        elif broken is not None:
            if not isinstance(broken, BrokenPipeError):
                self._say(f"cannot write the ranks' output: {broken.strerror}")
            exit_code = 128 + signal.SIGPIPE
        else:
            exit_code = 0
        self._drain()
        return exit_code

    def close(self) -> None:
        """Kills what is left and frees what the job held."""
        self._signal_groups(signal.SIGKILL)
        for rank in self._ranks:
            with rank.process:
                rank.process.wait()

    def _report_failure(self, rank: _Rank) -> int:
        assert rank.status is not None
        if rank.status > 0:
            how, exit_code = f"exit code {rank.status}", rank.status
        else:
            how, exit_code = f"killed by signal {signal_name(-rank.status)}", 128 - rank.status
        name, words = rank.stderr.last_words()
        says = f"; its {name}:" if words.strip() else "; it wrote nothing to stderr"
        self._say(f"rank {rank.number} of {len(self._ranks)} failed first: {how}{says}")
        self._stderr.put(self, b"", words)
        self._stderr.finish_line(self)
        return exit_code

    def _say(self, message: str) -> None:
        self._stderr.put(self, b"", f"fastdist run: {message}\n".encode())

    def _open_stream(self, fd: int, sink: Sink, number: int) -> Stream:
        prefix = b""
        if self._job.prefix:
            width = len(str(len(self._job.environments) - 1))
            text = f"[{number:{width}}]"
            if self._job.colour and sink.is_terminal:
                text = f"\x1b[{_COLOURS[number % len(_COLOURS)]}m{text}\x1b[0m"
            prefix = f"{text} ".encode()
        alone = len(self._job.environments) == 1 and not self._job.prefix
        stream = Stream(fd, sink, prefix, adds_last_newline=not alone)
        self._listen(stream)
        return stream

    def _listen(self, stream: Stream) -> None:
        self._selector.register(stream.fd, selectors.EVENT_READ, lambda: self._read(stream))

    def _streams(self) -> Iterator[Stream]:
        for rank in self._ranks:
            yield from (rank.stdout, rank.stderr)

    # The loop

    def _turn(self, timeout_s: float | None = None) -> bool:
        """Waits for something to happen and handles it; false when nothing did in that time."""
        now_s = time.monotonic()
        prompts = [stream.forward_prompt(_PROMPT_S) for stream in self._streams()]
        times_s = [
            time_s - now_s
            for time_s in (self._terminate_at_s, self._kill_at_s)
            if time_s is not None
        ]
        times_s += [_PROMPT_S] if any(prompts) else []
        times_s += [timeout_s] if timeout_s is not None else []
        self._pause_streams()
        events = self._selector.select(max(0.0, min(times_s)) if times_s else None)
        # Signals first: they tell that a rank has ended, and which did so first counts.
        for key, _ in sorted(events, key=lambda event: event[0].fd != self._signals):
            key.data()
        self._keep_times()
        return bool(events)

    def _keep_times(self) -> None:
        now_s = time.monotonic()
        if self._terminate_at_s is not None and now_s >= self._terminate_at_s:
            self._stop(signal.SIGTERM)
        if self._kill_at_s is not None and now_s >= self._kill_at_s:
            self._kill()
        if self._stopped_at_s is None and (self._stdout.error or self._stderr.error):
            self._stop(signal.SIGTERM)

    def _pause_streams(self) -> None:
        """Stops reading the streams whose sink does not keep up, so that their ranks wait."""
        for sink in {self._stdout, self._stderr}:
            if bool(sink.pending) == (sink in self._stalled):
                continue
            streams = [s for s in self._streams() if s.is_open and s.sink is sink]
            if sink.pending:
                self._stalled.add(sink)
                self._selector.register(sink.fd, selectors.EVENT_WRITE, sink.flush)
                for stream in streams:
                    self._selector.unregister(stream.fd)
            else:
                self._stalled.discard(sink)
                self._selector.unregister(sink.fd)
                for stream in streams:
                    self._listen(stream)

    def _drain(self) -> None:
        """Forwards what the ranks had written before they ended."""
        while self._turn(None if self._is_waiting() else 0.0) or self._is_waiting():
            continue

    def _is_waiting(self) -> bool:
        """Whether whoever reads the launcher's output is to be waited for."""
        pending = self._stdout.pending or self._stderr.pending
        return self._waits_for_readers and bool(pending)

    def _read(self, stream: Stream) -> bool:
        is_more = stream.read()
        if not stream.is_open and stream.fd in self._selector.get_map():
            self._selector.unregister(stream.fd)
        return is_more

    # What happens to ranks

    def _on_signals(self) -> None:
        for number in os.read(self._signals, 4096):
            if number != signal.SIGCHLD:
                self._interrupt(signal.Signals(number))
        self._collect()

    def _collect(self) -> None:
        """Notes which ranks have ended since the last time, and stops the others if one failed."""
        options = os.WEXITED | os.WNOHANG | os.WNOWAIT
        failed = []
        for rank in self._ranks:
            if rank.status is not None:
                continue
            ended = os.waitid(os.P_PID, rank.process.pid, options)
            if ended is not None:
                exited = ended.si_code == os.CLD_EXITED
                rank.status = ended.si_status if exited else -ended.si_status
                if rank.status != 0:
                    failed.append(rank)
        if not failed or self._stopped_at_s is not None:
            return
        for rank in failed:
            self._read_rest(rank.stderr)
        # Of ranks found at the same time, one that was killed has not failed because of another.
        self._failed += sorted(failed, key=lambda rank: rank.status is not None and rank.status > 0)
        if not all(rank.is_consequence for rank in self._failed):
            self._stop(signal.SIGTERM)
        elif self._terminate_at_s is None:
            # Peers can notice a failure while the rank that failed still ends. Wait to see it end.
            self._terminate_at_s = time.monotonic() + _CAUSE_WAIT_S

    def _read_rest(self, stream: Stream) -> None:
        for _ in range(_MOST_READS_AT_END):
            if not self._read(stream):
                return

    def _interrupt(self, number: signal.Signals) -> None:
        """Passes a signal on; a second Ctrl-C kills.

        Some wrappers pass on a Ctrl-C that the terminal has sent to the launcher too: two within
        the time of one key press are one.
        """
        now_s = time.monotonic()
        if self._stopped_at_s is None:
            self._stopped_by = number
            self._stop(number)
        elif number == signal.SIGINT and now_s - self._stopped_at_s > _SAME_KEY_PRESS_S:
            self._waits_for_readers = False
            self._kill()
        if all(rank.status is not None for rank in self._ranks):
            self._waits_for_readers = False

    def _stop(self, number: signal.Signals) -> None:
        self._stopped_at_s = time.monotonic()
        self._terminate_at_s, self._kill_at_s = None, self._stopped_at_s + _GRACE_S
        self._signal_groups(number)

    def _kill(self) -> None:
        self._kill_at_s = None
        self._waits_for_readers &= self._stopped_by is None
        self._signal_groups(signal.SIGKILL)

    def _signal_groups(self, number: signal.Signals) -> None:
        for rank in self._ranks:
            # No such process: all are gone. No permission: what is left belongs to another user.
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(rank.process.pid, number)

    def _has_strays(self) -> bool:
        return not live_groups().isdisjoint(rank.process.pid for rank in self._ranks)


def _is_same_file(first_fd: int, second_fd: int) -> bool:
    try:
        return os.path.sameopenfile(first_fd, second_fd)
    except OSError:  # one is closed
        return False
