"""Runs the processes of a job in the foreground, and ends all of them with the job.

One loop in one thread waits for the processes' output, for room in the launcher's own output, and
for signals, which arrive as bytes in a pipe. SIGCHLD reports the end of a process.

To stop a job, the launcher signals all groups (`Sessions`), and kills them after a grace period.
"""

import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial

from fastdist.processes.job import Ending, Job, Task
from fastdist.processes.output import Lines, Sink, Stream
from fastdist.processes.process import Process, StartError
from fastdist.processes.sessions import Sessions
from fastdist.processes.terminal import fitted

_CAUSE_WAIT_S = 2.0
_SAME_KEY_PRESS_S = 0.25
_PROMPT_S = 0.1
_GROUP_POLL_S = 0.02


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of a job."""

    # Of the process whose failure ended the job, or 128 + the signal that killed that process or
    # stopped the launcher.
    exit_code: int
    has_failed: bool  # a process's failure ended the job, and no signal stopped the launcher
    # The process that failed first, and its exit code or minus the signal that killed it.
    first: tuple[int, int] | None = None


def supervise(job: Job) -> Outcome:
    """Run a job to its end, in the main thread, with this process's stdin, stdout and stderr.

    Raises:
        StartError: a process could not be started; the others have been ended.
    """
    with (
        _signal_pipe() as signals,
        selectors.PollSelector() as selector,
        closing(Sessions()) as sessions,
    ):
        supervisor = _Supervisor(job, signals, selector, sessions)
        supervisor.run()
        return supervisor.report()


@contextmanager
def _signal_pipe() -> Iterator[int]:
    """Yield a pipe that receives a byte for each SIGCHLD, SIGINT, SIGTERM and SIGHUP."""
    numbers = [signal.SIGCHLD, signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # set by nohup
        numbers.append(signal.SIGHUP)
    read, write = os.pipe()
    os.set_blocking(read, False)
    os.set_blocking(write, False)
    old_fd = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    old = {number: signal.signal(number, lambda *_: None) for number in numbers}
    mask = signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)  # the program that started this one
    try:
        yield read
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for number, handler in old.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(old_fd)
        os.close(read)
        os.close(write)


class _Supervisor:
    def __init__(
        self, job: Job, signals: int, selector: selectors.BaseSelector, sessions: Sessions
    ) -> None:
        self._job = job
        self._signals = signals
        self._selector = selector
        self._sessions = sessions
        self._processes: list[Process] = []  # in the order of the job's tasks
        self._lines: dict[Stream, Lines] = {}
        self._stdout = Sink(1)
        self._stderr = self._stdout if _is_same_file(1, 2) else Sink(2)
        self._failed: list[Process] = []
        self._left: list[str] = []  # names of tasks that ended well before one failed
        self._restarts = 0
        self._restarting: set[Process] = set()  # ended, to be started again in a moment
        self._timers: dict[Callable[[], None], float] = {}  # functions to call, and when
        self._stopped_at_s: float | None = None
        self._stopped_by: signal.Signals | None = None
        self._waits_for_readers = True
        selector.register(signals, selectors.EVENT_READ, self._on_signals)
        if job.ends_with_stdin:
            selector.register(0, selectors.EVENT_READ, self._on_stdin)

    def run(self) -> None:
        """Start the tasks; return when no process of any group is left."""
        for number in range(len(self._job.tasks)):
            self._processes.append(self._start(number))
        while self._restarting or any(process.status is None for process in self._processes):
            self._run_once()
        if self._sessions.has_strays() and self._stopped_at_s is None:
            self._terminate()
        while self._sessions.has_strays():
            self._run_once(_GROUP_POLL_S)
        if self._stopped_by is None:
            self._timers.clear()
        self._drain()

    def report(self) -> Outcome:
        """Write how the job ended as the last lines of stderr, and return it."""
        broken = self._stdout.error or self._stderr.error
        first = next((p for p in self._failed if not p.is_consequence), None)
        first = first or next(iter(self._failed), None)
        if first is not None:
            exit_code = self._report_failure(first)
        elif self._stopped_by is not None:
            self._say(f"stopped by {self._stopped_by.name}")
            exit_code = 128 + self._stopped_by
        elif broken is not None:
            if not isinstance(broken, BrokenPipeError):
                self._say(f"cannot write the job's output: {broken.strerror}")
            exit_code = 128 + signal.SIGPIPE
        else:
            exit_code = 0
        self._drain()
        ended = None if first is None else (first.popen.pid, first.status or 0)
        return Outcome(exit_code, bool(self._failed) and self._stopped_by is None, ended)

    def _report_failure(self, process: Process) -> int:
        how, words = process.report()
        who = f"{process.name} failed"
        if process.exit_code == os.EX_TEMPFAIL:
            self._say(f"{process.name} asks to be started again: {process.how_it_ended}")
            return process.exit_code
        if self._task(process).ending is Ending.ONE_OF_ALL:
            who = f"{process.name} of {self._job.size} failed first"
            if self._left and process.is_consequence:
                who += f", after {', '.join(self._left)} had ended with exit code 0"
        self._say(f"{who}: {how}")
        self._stderr.put(self, b"", words)
        self._stderr.finish_line(self)
        return process.exit_code

    def _say(self, message: str) -> None:
        line = fitted(f"fastdist run: {message}\n", sys.stderr)
        self._stderr.put(self, b"", line.encode())

    def _task(self, process: Process) -> Task:
        return self._job.tasks[self._processes.index(process)]

    def _start(self, number: int) -> Process:
        task = self._job.tasks[number]
        prefix = f"[{task.label}] ".encode() if self._job.prefix else b""
        lines = [
            Lines(sink, prefix, adds_last_newline=bool(prefix) or len(self._job.tasks) > 1)
            for sink in (self._stdout, self._stderr)
        ]
        stdin: int | None = subprocess.DEVNULL
        if task.command is not None:
            stdin = subprocess.PIPE
        elif number == 0 and not self._job.ends_with_stdin:
            stdin = None
        command = task.command or self._job.command
        receivers = [line.put for line in lines]
        process = self._sessions.start(task.name, command, task.environment, receivers, stdin=stdin)
        if process.popen.stdin is not None:
            with suppress(BrokenPipeError):  # it has ended already, and says why
                process.popen.stdin.write(task.stdin)
        self._lines.update(zip(process.streams, lines, strict=True))
        return process

    # The loop

    def _run_once(self, timeout_s: float | None = None) -> bool:
        """Wait for events and handle them; return False if there were none in time."""
        now_s = time.monotonic()
        prompts = [lines.forward_prompt(_PROMPT_S) for lines in self._lines.values()]
        times_s = [at_s - now_s for at_s in self._timers.values()]
        times_s += [_PROMPT_S] if any(prompts) else []
        times_s += [timeout_s] if timeout_s is not None else []
        self._watch_files()
        events = self._selector.select(max(0.0, min(times_s)) if times_s else None)
        # Signals first: they report the end of processes, whose order matters.
        for key, _ in sorted(events, key=lambda event: event[0].fd != self._signals):
            key.data()
        now_s = time.monotonic()
        for act in [act for act, at_s in self._timers.items() if now_s >= at_s]:
            if self._timers.pop(act, None) is not None:  # else one before has cancelled it
                act()
        if self._stopped_at_s is None and (self._stdout.error or self._stderr.error):
            self._terminate()
        return bool(events)

    def _watch_files(self) -> None:
        """Watch sinks that do not keep up instead of their streams, so that processes wait."""
        for sink in {self._stdout, self._stderr}:
            is_watched = sink.fd in self._selector.get_map()
            if sink.pending and not is_watched:
                self._selector.register(sink.fd, selectors.EVENT_WRITE, sink.flush)
            elif is_watched and not sink.pending:
                self._selector.unregister(sink.fd)
        for stream, lines in self._lines.items():
            if lines.sink.pending:
                stream.pause()
            else:
                stream.watch(self._selector)

    def _drain(self) -> None:
        """Forward the remaining output of the ended processes."""
        while self._run_once(None if self._is_waiting() else 0.0) or self._is_waiting():
            continue

    def _is_waiting(self) -> bool:
        """Return True while the reader of the launcher's output must be waited for."""
        pending = self._stdout.pending or self._stderr.pending
        return self._waits_for_readers and bool(pending)

    # Processes

    def _on_signals(self) -> None:
        for number in os.read(self._signals, 4096):
            if number != signal.SIGCHLD:
                self._interrupt(signal.Signals(number))
        self._collect()

    def _on_stdin(self) -> None:
        """Stop the job if the launcher that started this one has ended."""
        try:
            if os.read(0, 4096):
                return
        except OSError:
            pass
        self._selector.unregister(0)
        self._interrupt(signal.SIGTERM)

    def _collect(self) -> None:
        """Find the processes that have ended, and stop the job or restart them."""
        running = [process for process in self._processes if process.status is None]
        ended = [process for process in running if process.poll() is not None]
        if self._stopped_at_s is not None:
            return
        failed = [process for process in ended if process.status != 0]
        for process in failed:
            process.streams[1].read_rest()
        by_ending = {e: [p for p in failed if self._task(p).ending is e] for e in Ending}
        if any(self._task(process).ending is Ending.ENDS_JOB for process in ended):
            self._failed += by_ending[Ending.ENDS_JOB]
            self._terminate()
            return
        elastic = self._job.elastic
        if elastic is not None:
            if any(process.status == 0 for process in ended):
                elastic.finish()
            too_early = [p for p in by_ending[Ending.RESTARTED] if (p.status or 0) > 0]
            if too_early and not elastic.has_begun():
                self._failed += too_early
                self._terminate()
                return
        for process in by_ending[Ending.RESTARTED]:
            self._schedule_restart(process)
        if by_ending[Ending.ONE_OF_ALL]:
            self._stop_after(by_ending[Ending.ONE_OF_ALL])

    def _stop_after(self, failed: list[Process]) -> None:
        """Stop the job, now or after a wait for the process that failed first."""
        if not self._failed:
            self._left = [p.name for p in self._processes if p.status == 0]
        # Of processes found at the same time, a killed one has not failed because of another.
        self._failed += sorted(failed, key=lambda p: p.status is not None and p.status > 0)
        if not all(process.is_consequence for process in self._failed):
            self._terminate()
        else:
            # Peers can notice a failure before the failed process has ended. Wait for its end.
            self._timers.setdefault(self._terminate, time.monotonic() + _CAUSE_WAIT_S)

    def _schedule_restart(self, process: Process) -> None:
        is_final = process.status in self._task(process).final_codes
        most = 0 if is_final else self._job.max_restarts
        failure = f"{process.name} failed: {process.how_it_ended}"
        least = self._job.elastic.least if self._job.elastic is not None else 0
        if least and any(p.status == 0 for p in self._processes):
            self._say(f"warning: {failure}; another has done the work, it is not restarted")
        elif self._restarts < most:
            self._restarts += 1
            self._say(f"{failure}; restarting it (restart {self._restarts} of {most})")
            self._restarting.add(process)
            delay_s = self._task(process).restart_delay_s
            self._timers[partial(self._restart, process)] = time.monotonic() + delay_s
        else:
            if is_final:
                why = "its own restarts are used up"
            else:
                why = f"all {most} restarts are used up" if most else "--max-restarts is 0"
            left = sum(p.status is None for p in self._processes) + len(self._restarting)
            if left < least:
                self._say(f"{failure}; {why}, and {left} of at least {least} are left")
                self._failed.append(process)
                self._terminate()
            else:
                self._say(f"warning: {failure}; {why}, the job continues without it")

    def _restart(self, process: Process) -> None:
        self._restarting.discard(process)
        process.signal_group(signal.SIGKILL)  # its children may hold its address
        for stream in process.streams:
            stream.finish()
            del self._lines[stream]
        self._sessions.release(process)
        number = self._processes.index(process)
        try:
            self._processes[number] = self._start(number)
        except StartError as error:
            self._say(f"warning: {error}; the job continues without {process.name}")

    def _interrupt(self, number: signal.Signals) -> None:
        """Send a signal to all groups; a second Ctrl-C kills.

        Some wrappers forward a Ctrl-C that the terminal has also sent to the launcher: two signals
        within the time of one key press count as one.
        """
        now_s = time.monotonic()
        if self._stopped_at_s is None:
            self._stopped_by = number
            self._stop(number)
        elif number == signal.SIGINT and now_s - self._stopped_at_s > _SAME_KEY_PRESS_S:
            self._waits_for_readers = False
            self._kill()
        if all(process.status is not None for process in self._processes):
            self._waits_for_readers = False

    def _terminate(self) -> None:
        self._stop(signal.SIGTERM)

    def _stop(self, number: signal.Signals) -> None:
        self._stopped_at_s = time.monotonic()
        self._restarting.clear()
        self._timers = {self._kill: self._stopped_at_s + self._job.grace_s}
        self._sessions.signal(number)

    def _kill(self) -> None:
        self._timers.clear()
        self._waits_for_readers &= self._stopped_by is None
        self._sessions.signal(signal.SIGKILL)


def _is_same_file(first_fd: int, second_fd: int) -> bool:
    try:
        return os.path.sameopenfile(first_fd, second_fd)
    except OSError:  # a descriptor is closed
        return False
