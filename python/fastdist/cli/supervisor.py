"""Runs the processes of a job as child processes, and ends all of them with the job.

One loop in one thread waits for the processes' output, for room in the launcher's own output, and
for signals, which arrive as bytes in a pipe. SIGCHLD reports the end of a process.

Every process leads a process group in a session of its own. A terminal's Ctrl-C therefore reaches
the launcher alone, and a signal to the group reaches all children of the process. An ended process
stays a zombie until it is restarted or the launcher returns, so that no other process can get the
number of the group.

To stop a job, the launcher signals all groups, and kills them after a grace period. If the launcher
itself is killed, the kernel kills the processes, and a guardian process their children.
"""

import os
import selectors
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass

from fastdist.cli.guardian import Guardian
from fastdist.cli.job import Ending, Job, Process, StartError, start
from fastdist.cli.output import Sink, Stream
from fastdist.cli.processes import live_groups, signal_pipe
from fastdist.replicas.processes import death_signal_setter, is_consequence

_CAUSE_WAIT_S = 2.0
_RESTART_DELAY_S = 0.2
_SAME_KEY_PRESS_S = 0.25
_PROMPT_S = 0.1
_GROUP_POLL_S = 0.02
_MOST_READS_AT_END = 32
_COLOURS = (36, 33, 32, 35, 34, 31)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of a job.

    Attributes:
        exit_code: 0 if the job succeeded; the exit code of the process whose failure ended the
            job, or 128 + the signal that killed that process; 128 + the signal that stopped the
            launcher.
        has_failed: True if a process's failure ended the job, and no signal stopped the launcher.
    """

    exit_code: int
    has_failed: bool


def supervise(job: Job) -> Outcome:
    """Runs a job to its end.

    The job's output goes to this process's stdout and stderr, and the first task reads this
    process's stdin. Must be called in the main thread.

    Raises:
        StartError: a process could not be started; the others have been ended.
    """
    with signal_pipe() as signals, selectors.PollSelector() as selector:
        supervisor = _Supervisor(job, signals, selector)
        try:
            supervisor.start()
            supervisor.wait()
            return Outcome(supervisor.report(), supervisor.has_failed)
        finally:
            supervisor.close()


class _Supervisor:
    def __init__(self, job: Job, signals: int, selector: selectors.BaseSelector) -> None:
        self._job = job
        self._signals = signals
        self._selector = selector
        self._die_with_parent = death_signal_setter()
        self._guardian = Guardian()
        self._processes: list[Process] = []
        self._stdout = Sink(1)
        self._stderr = self._stdout if _is_same_file(1, 2) else Sink(2)
        self._stalled: set[Sink] = set()
        self._failed: list[Process] = []
        self._left: list[str] = []  # names of ranks that ended well before a rank failed
        self._restarts = 0
        self._restarts_due: list[tuple[float, Process]] = []
        self._terminate_at_s: float | None = None
        self._stopped_at_s: float | None = None
        self._kill_at_s: float | None = None
        self._stopped_by: signal.Signals | None = None
        self._waits_for_readers = True
        selector.register(signals, selectors.EVENT_READ, self._on_signals)
        if job.ends_with_stdin:
            selector.register(0, selectors.EVENT_READ, self._on_stdin)

    def start(self) -> None:
        for number in range(len(self._job.tasks)):
            self._processes.append(self._start(number))

    def wait(self) -> None:
        """Returns when no process of any group is left."""
        while any(process.status is None for process in self._processes):
            self._run_once()
        if self._has_strays() and self._stopped_at_s is None:
            self._stop(signal.SIGTERM)
        while self._has_strays():
            self._run_once(_GROUP_POLL_S)
        if self._stopped_by is None:
            self._kill_at_s = None
        self._drain()

    def report(self) -> int:
        """Writes how the job ended as the last lines of stderr, and returns the exit code."""
        broken = self._stdout.error or self._stderr.error
        first = next((p for p in self._failed if not _is_consequence(p)), None)
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
        return exit_code

    @property
    def has_failed(self) -> bool:
        """True if a process's failure ended the job, and no signal stopped the launcher."""
        return bool(self._failed) and self._stopped_by is None

    def close(self) -> None:
        """Kills the remaining processes and releases the resources of the job."""
        self._signal_groups(signal.SIGKILL)
        for process in self._processes:
            self._reap(process)
        self._guardian.close()

    def _reap(self, process: Process) -> None:
        self._guardian.remove(process.popen.pid)
        process.reap()

    def _report_failure(self, process: Process) -> int:
        name, words = process.stderr.last_words()
        says = f"; its {name}:" if words.strip() else "; it wrote nothing to stderr"
        who = f"{process.task.name} failed"
        if process.exit_code == os.EX_TEMPFAIL:
            self._say(f"{process.task.name} asks to be started again: {process.how_it_ended}")
            return process.exit_code
        if process.task.ending is Ending.ONE_OF_ALL:
            who = f"{process.task.name} of {self._job.size} failed first"
            if self._left and _is_consequence(process):
                who += f", after {', '.join(self._left)} had ended with exit code 0"
        self._say(f"{who}: {process.how_it_ended}{says}")
        self._stderr.put(self, b"", words)
        self._stderr.finish_line(self)
        return process.exit_code

    def _say(self, message: str) -> None:
        self._stderr.put(self, b"", f"fastdist run: {message}\n".encode())

    def _start(self, number: int) -> Process:
        popen, out, err = start(self._job, number, self._die_with_parent)
        self._guardian.add(popen.pid)
        stdout = self._open_stream(out, self._stdout, number)
        stderr = self._open_stream(err, self._stderr, number)
        return Process(self._job.tasks[number], number, popen, stdout, stderr)

    def _open_stream(self, fd: int, sink: Sink, number: int) -> Stream:
        prefix = b""
        if self._job.prefix:
            text = f"[{self._job.tasks[number].label}]"
            if self._job.colour and sink.is_terminal:
                text = f"\x1b[{_COLOURS[number % len(_COLOURS)]}m{text}\x1b[0m"
            prefix = f"{text} ".encode()
        alone = len(self._job.tasks) == 1 and not self._job.prefix
        stream = Stream(fd, sink, prefix, adds_last_newline=not alone)
        if sink not in self._stalled:
            self._listen(stream)
        return stream

    def _listen(self, stream: Stream) -> None:
        self._selector.register(stream.fd, selectors.EVENT_READ, lambda: self._read(stream))

    def _streams(self) -> Iterator[Stream]:
        for process in self._processes:
            yield from (process.stdout, process.stderr)

    # The loop

    def _run_once(self, timeout_s: float | None = None) -> bool:
        """Waits for events and handles them; returns False if there were none in time."""
        now_s = time.monotonic()
        prompts = [stream.forward_prompt(_PROMPT_S) for stream in self._streams()]
        times_s = [
            time_s - now_s
            for time_s in (self._terminate_at_s, self._kill_at_s)
            if time_s is not None
        ]
        times_s += [time_s - now_s for time_s, _ in self._restarts_due]
        times_s += [_PROMPT_S] if any(prompts) else []
        times_s += [timeout_s] if timeout_s is not None else []
        self._pause_streams()
        events = self._selector.select(max(0.0, min(times_s)) if times_s else None)
        # Signals first: they report the end of processes, whose order matters.
        for key, _ in sorted(events, key=lambda event: event[0].fd != self._signals):
            key.data()
        self._run_timers()
        return bool(events)

    def _run_timers(self) -> None:
        now_s = time.monotonic()
        if self._terminate_at_s is not None and now_s >= self._terminate_at_s:
            self._stop(signal.SIGTERM)
        if self._kill_at_s is not None and now_s >= self._kill_at_s:
            self._kill()
        if self._stopped_at_s is None and (self._stdout.error or self._stderr.error):
            self._stop(signal.SIGTERM)
        while self._restarts_due and now_s >= self._restarts_due[0][0]:
            self._restart(self._restarts_due.pop(0)[1])

    def _pause_streams(self) -> None:
        """Pauses the streams of a sink that does not keep up, so that their processes wait."""
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
        """Forwards the remaining output of the ended processes."""
        while self._run_once(None if self._is_waiting() else 0.0) or self._is_waiting():
            continue

    def _is_waiting(self) -> bool:
        """Returns True while the reader of the launcher's output must be waited for."""
        pending = self._stdout.pending or self._stderr.pending
        return self._waits_for_readers and bool(pending)

    def _read(self, stream: Stream) -> bool:
        is_more = stream.read()
        if not stream.is_open and stream.fd in self._selector.get_map():
            self._selector.unregister(stream.fd)
        return is_more

    # Processes

    def _on_signals(self) -> None:
        for number in os.read(self._signals, 4096):
            if number != signal.SIGCHLD:
                self._interrupt(signal.Signals(number))
        self._collect()

    def _on_stdin(self) -> None:
        """Stops the job if the launcher that started this one has ended."""
        try:
            if os.read(0, 4096):
                return
        except OSError:
            pass
        self._selector.unregister(0)
        self._interrupt(signal.SIGTERM)

    def _collect(self) -> None:
        """Finds the processes that have ended, and stops the job or restarts them."""
        ended = [process for process in self._processes if process.has_ended()]
        if self._stopped_at_s is not None:
            return
        failed = [process for process in ended if process.status != 0]
        for process in failed:
            self._read_rest(process.stderr)
        by_ending = {e: [p for p in failed if p.task.ending is e] for e in Ending}
        if any(process.task.ending is Ending.ENDS_JOB for process in ended):
            self._failed += by_ending[Ending.ENDS_JOB]
            self._stop(signal.SIGTERM)
            return
        for process in by_ending[Ending.RESTARTED]:
            self._schedule_restart(process)
        if by_ending[Ending.ONE_OF_ALL]:
            self._stop_after(by_ending[Ending.ONE_OF_ALL])

    def _stop_after(self, failed: list[Process]) -> None:
        """Stops the job, now or after a wait for the rank that failed first."""
        if not self._failed:
            self._left = [p.task.name for p in self._processes if p.status == 0]
        # Of processes found at the same time, a killed one has not failed because of another.
        self._failed += sorted(failed, key=lambda p: p.status is not None and p.status > 0)
        if not all(_is_consequence(process) for process in self._failed):
            self._stop(signal.SIGTERM)
        elif self._terminate_at_s is None:
            # Peers can notice a failure before the failed rank has ended. Wait for its end.
            self._terminate_at_s = time.monotonic() + _CAUSE_WAIT_S

    def _schedule_restart(self, process: Process) -> None:
        most = self._job.max_restarts
        failure = f"{process.task.name} failed: {process.how_it_ended}"
        if self._restarts == most:
            why = f"all {most} restarts are used up" if most else "--max-restarts is 0"
            self._say(f"warning: {failure}; {why}, the job continues without it")
            return
        self._restarts += 1
        self._say(f"{failure}; restarting it (restart {self._restarts} of {most})")
        self._restarts_due.append((time.monotonic() + _RESTART_DELAY_S, process))

    def _restart(self, process: Process) -> None:
        process.signal_group(signal.SIGKILL)  # its children may hold its address
        for stream in (process.stdout, process.stderr):
            self._read_rest(stream)
            if stream.fd in self._selector.get_map():
                self._selector.unregister(stream.fd)
            stream.end()
        self._reap(process)
        try:
            self._processes[process.number] = self._start(process.number)
        except StartError as error:
            self._say(f"warning: {error}; the job continues without {process.task.name}")

    def _read_rest(self, stream: Stream) -> None:
        for _ in range(_MOST_READS_AT_END):
            if not self._read(stream):
                return

    def _interrupt(self, number: signal.Signals) -> None:
        """Sends a signal to all groups; a second Ctrl-C kills.

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

    def _stop(self, number: signal.Signals) -> None:
        self._stopped_at_s = time.monotonic()
        self._terminate_at_s, self._kill_at_s = None, self._stopped_at_s + self._job.grace_s
        self._restarts_due.clear()
        self._signal_groups(number)

    def _kill(self) -> None:
        self._kill_at_s = None
        self._waits_for_readers &= self._stopped_by is None
        self._signal_groups(signal.SIGKILL)

    def _signal_groups(self, number: signal.Signals) -> None:
        for process in self._processes:
            process.signal_group(number)

    def _has_strays(self) -> bool:
        groups = live_groups()
        return any(process.is_alive_in(groups) for process in self._processes)


def _is_consequence(process: Process) -> bool:
    """Returns True if the process failed with PeerFailureError, because another rank had failed."""
    return is_consequence(process.status, process.stderr.last_words()[1])


def _is_same_file(first_fd: int, second_fd: int) -> bool:
    try:
        return os.path.sameopenfile(first_fd, second_fd)
    except OSError:  # a descriptor is closed
        return False
