"""Runs the processes of a job as children of this one, and ends all of them when the job is over.

One loop in one thread waits for everything: the processes' output, room in the launcher's own
output, and signals, which arrive as bytes in a pipe; SIGCHLD among them says that one has ended.

Every process leads a process group of its own, in a session of its own, so that a terminal's Ctrl-C
reaches the launcher alone and a signal to the group reaches what the process has started. One that
has ended stays a zombie until it is started again or the launcher returns: this keeps the group's
number from being used for somebody else's processes.

To stop, the launcher signals all groups, and kills after a grace what is left. If it is killed
itself, the kernel kills the processes.
"""

import os
import re
import selectors
import signal
import time
from collections.abc import Iterator

from fastdist.cli.job import Ending, Job, Process, StartError, start
from fastdist.cli.output import Sink, Stream
from fastdist.cli.processes import death_signal_setter, live_groups, signal_pipe

_GRACE_S = 5.0
_CAUSE_WAIT_S = 2.0
_RESTART_DELAY_S = 0.2
_SAME_KEY_PRESS_S = 0.25
_PROMPT_S = 0.1
_GROUP_POLL_S = 0.02
_MOST_READS_AT_END = 32
_COLOURS = (36, 33, 32, 35, 34, 31)
_PEER_FAILURE = re.compile(rb"^[\w.]*PeerFailureError\b", re.M)


def supervise(job: Job) -> int:
    """Runs a job to its end.

    Output goes to this process's stdout and stderr, and the first task reads its stdin. Must be
    called in the main thread.

    Returns:
        0 when the job has gone well; the exit code of the process whose failure ended it, or 128
        and the number of the signal that killed that one; 128 and the number of the signal that
        stopped the launcher.

    Raises:
        StartError: a process could not be started; none is left running.
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
        self._die_with_parent = death_signal_setter()
        self._processes: list[Process] = []
        self._stdout = Sink(1)
        self._stderr = self._stdout if _is_same_file(1, 2) else Sink(2)
        self._stalled: set[Sink] = set()
        self._failed: list[Process] = []
        self._restarts = 0
        self._to_start_again: list[tuple[float, Process]] = []
        self._terminate_at_s: float | None = None
        self._stopped_at_s: float | None = None
        self._kill_at_s: float | None = None
        self._stopped_by: signal.Signals | None = None
        self._waits_for_readers = True
        selector.register(signals, selectors.EVENT_READ, self._on_signals)

    def start(self) -> None:
        for number in range(len(self._job.tasks)):
            self._processes.append(self._start(number))

    def wait(self) -> None:
        """Returns when no process, and nothing that one has started in its group, is left."""
        while any(process.status is None for process in self._processes):
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

    def close(self) -> None:
        """Kills what is left and frees what the job held."""
        self._signal_groups(signal.SIGKILL)
        for process in self._processes:
            process.reap()

    def _report_failure(self, process: Process) -> int:
        name, words = process.stderr.last_words()
        says = f"; its {name}:" if words.strip() else "; it wrote nothing to stderr"
        who = f"{process.task.name} failed"
        if process.task.ending is Ending.ONE_OF_ALL:
            who = f"{process.task.name} of {len(self._processes)} failed first"
        self._say(f"{who}: {process.how_it_ended}{says}")
        self._stderr.put(self, b"", words)
        self._stderr.finish_line(self)
        return process.exit_code

    def _say(self, message: str) -> None:
        self._stderr.put(self, b"", f"fastdist run: {message}\n".encode())

    def _start(self, number: int) -> Process:
        popen, out, err = start(self._job, number, self._die_with_parent)
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

    def _turn(self, timeout_s: float | None = None) -> bool:
        """Waits for something to happen and handles it; false when nothing did in that time."""
        now_s = time.monotonic()
        prompts = [stream.forward_prompt(_PROMPT_S) for stream in self._streams()]
        times_s = [
            time_s - now_s
            for time_s in (self._terminate_at_s, self._kill_at_s)
            if time_s is not None
        ]
        times_s += [time_s - now_s for time_s, _ in self._to_start_again]
        times_s += [_PROMPT_S] if any(prompts) else []
        times_s += [timeout_s] if timeout_s is not None else []
        self._pause_streams()
        events = self._selector.select(max(0.0, min(times_s)) if times_s else None)
        # Signals first: they tell that one has ended, and which did so first counts.
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
        while self._to_start_again and now_s >= self._to_start_again[0][0]:
            self._start_again(self._to_start_again.pop(0)[1])

    def _pause_streams(self) -> None:
        """Stops reading the streams whose sink does not keep up, so that who writes waits."""
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
        """Forwards what the processes had written before they ended."""
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

    # What happens to processes

    def _on_signals(self) -> None:
        for number in os.read(self._signals, 4096):
            if number != signal.SIGCHLD:
                self._interrupt(signal.Signals(number))
        self._collect()

    def _collect(self) -> None:
        """Notes who has ended since the last time, and does what that means for the job."""
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
        for process in by_ending[Ending.STARTED_AGAIN]:
            self._plan_to_start_again(process)
        if by_ending[Ending.ONE_OF_ALL]:
            self._end_after(by_ending[Ending.ONE_OF_ALL])

    def _end_after(self, failed: list[Process]) -> None:
        """Stops the others, now or when there was time to see who has failed really first."""
        # Of those found at the same time, one that was killed has not failed because of another.
        self._failed += sorted(failed, key=lambda p: p.status is not None and p.status > 0)
        if not all(_is_consequence(process) for process in self._failed):
            self._stop(signal.SIGTERM)
        elif self._terminate_at_s is None:
            # Peers can notice a failure while the rank that failed still ends. Wait to see it end.
            self._terminate_at_s = time.monotonic() + _CAUSE_WAIT_S

    def _plan_to_start_again(self, process: Process) -> None:
        most = self._job.max_restarts
        failure = f"{process.task.name} failed: {process.how_it_ended}"
        if self._restarts == most:
            why = f"all {most} restarts are used up" if most else "--max-restarts is 0"
            self._say(f"warning: {failure}; {why}, the job goes on without it")
            return
        self._restarts += 1
        self._say(f"{failure}; it is started again (restart {self._restarts} of {most})")
        self._to_start_again.append((time.monotonic() + _RESTART_DELAY_S, process))

    def _start_again(self, process: Process) -> None:
        process.signal_group(signal.SIGKILL)  # what it has left may hold its address
        for stream in (process.stdout, process.stderr):
            self._read_rest(stream)
            if stream.fd in self._selector.get_map():
                self._selector.unregister(stream.fd)
            stream.end()
        process.reap()
        try:
            self._processes[process.number] = self._start(process.number)
        except StartError as error:
            self._say(f"warning: {error}; the job goes on without {process.task.name}")

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
        if all(process.status is not None for process in self._processes):
            self._waits_for_readers = False

    def _stop(self, number: signal.Signals) -> None:
        self._stopped_at_s = time.monotonic()
        self._terminate_at_s, self._kill_at_s = None, self._stopped_at_s + _GRACE_S
        self._to_start_again.clear()
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
        return any(process.has_left(groups) for process in self._processes)


def _is_consequence(process: Process) -> bool:
    """Whether it failed because another rank had failed, by what it says itself."""
    words = process.stderr.last_words()[1]
    return (process.status or 0) > 0 and _PEER_FAILURE.search(words) is not None


def _is_same_file(first_fd: int, second_fd: int) -> bool:
    try:
        return os.path.sameopenfile(first_fd, second_fd)
    except OSError:  # one is closed
        return False
