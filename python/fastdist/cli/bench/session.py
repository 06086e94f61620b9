"""Starts the ranks of all engines, runs cases on them side by side, and ends them.

Every engine's ranks are started once and stay alive, blocked on their channel while another engine
is measured. A case is measured in rounds. In every round all engines take turns, so that other load
of the machine slows all engines equally. The copy bandwidth for the floor is measured in the same
rounds.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import statistics
import subprocess
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NoReturn

from fastdist.cli.bench import results
from fastdist.cli.bench.cases import Case
from fastdist.cli.bench.peers import Engine
from fastdist.cli.bench.results import Measurement, Placement, Row
from fastdist.cli.machine_facts import largest_cache_bytes, total_cache_bytes
from fastdist.cluster.launch import without_rank
from fastdist.errors import FastdistError
from fastdist.link.peer import peer_pid
from fastdist.processes.process import StartError
from fastdist.processes.sessions import Sessions

ROUNDS = 5

_COPIES = 4  # per round; the first is not counted
_LEAST_COPY_BYTES = 64 << 20
_GPU_COPY_BYTES = 512 << 20  # several times the cache of any GPU
_MOST_ITERATIONS = 20_000  # per round

_START_TIMEOUT_S = 120.0
_POLL_S = 0.2
_QUIT_S = 10.0
_LAST_WORDS_S = 1.0
_TERMINATE_S = 2.0
_LOG_LINES = 25
_PREFIX = re.compile(r"^\[ *\S+\] ")  # of each line that ranks of fastdist run print
_EXCEPTION = re.compile(r"(?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*(?:Error|Exception)\b")


@dataclass(frozen=True, slots=True)
class Effort:
    """The effort per case and engine."""

    time_s: float = 1.0  # to spend, if `iterations` is None
    iterations: int | None = None  # timed calls; None: as many as fit in `time_s`
    warmup: int = 5  # calls before the timed calls
    rounds: int = ROUNDS  # turns of each engine
    timeout_s: float = 300.0  # to wait for an answer of an engine


class EngineError(FastdistError):
    """An engine failed.

    The message has the engine and the reason, one line, then the rank and its output.
    """

    def __init__(self, message: str, engine: str, reason: str) -> None:
        super().__init__(message)
        self.engine = engine
        self.reason = reason


class EngineRanks:
    """The ranks of one engine, the channel to each of them, and the times of a case."""

    def __init__(self, engine: Engine, ranks: int, socket_path: Path, effort: Effort) -> None:
        self.engine = engine
        self.version = ""
        self._ranks = ranks
        self._socket_path = socket_path
        self._log = socket_path.with_suffix(".log")
        self._effort = effort
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._launched = Sessions()
        self._channels: dict[int, Connection[Any, Any]] = {}
        self._workers: list[int] = []  # pidfds: a launcher's ranks need not be in its group

    def launch(self) -> None:
        """Start the engine's launcher; its ranks connect to the socket."""
        self._deadline = time.monotonic() + _START_TIMEOUT_S
        self._listener.bind(str(self._socket_path))
        self._listener.listen(self._ranks)
        engine = self.engine
        command = [*engine.command, engine.driver, str(self._socket_path)]
        environment = {**without_rank(os.environ), **engine.environment}
        with self._log.open("wb") as log:
            output: dict[str, Any] = {"stdout": log, "stderr": subprocess.STDOUT}
            try:
                self._launched.start(engine.name, command, environment, **output)
            except StartError as error:
                self._fail(f"cannot run {engine.command[0]}: {error.reason}")

    def connect(self) -> None:
        """Wait until every rank has connected, and has started the engine."""
        while len(self._channels) < self._ranks:
            # Connections first: a rank that has ended may have sent its error.
            if wait([self._listener], _POLL_S):
                self._accept()
                continue
            (launcher,) = self._launched.processes
            if (status := launcher.poll()) is not None:
                for rank, channel in self._channels.items():
                    with contextlib.suppress(EOFError, OSError):
                        while channel.poll():
                            self._take(rank)  # raises if the rank has sent an error
                when = f"before all {self._ranks} ranks had started"
                self._fail(f"{self.engine.command[0]} ended with status {status} {when}")
            if time.monotonic() > self._deadline:
                started = f"{len(self._channels)} of {self._ranks} ranks started"
                self._fail(f"{started} within {_START_TIMEOUT_S:.0f} s")
        self.version = self._replies(_START_TIMEOUT_S)[0]

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        with contextlib.suppress(ProcessLookupError):  # it has ended
            self._workers.append(os.pidfd_open(peer_pid(connection)))
        channel: Connection[Any, Any] = Connection(connection.detach())
        try:
            rank = channel.recv()
        except (EOFError, OSError):
            return  # its launcher reports the error
        if rank in self._channels or not 0 <= rank < self._ranks:
            expected = f"expected ranks 0 to {self._ranks - 1} once each"
            self._fail(f"{expected}, got another rank {rank}", output="")
        self._channels[rank] = channel

    def command(self, name: str, **arguments: object) -> list[Any]:
        """Call a method of `Worker` on every rank; return the results in the order of ranks."""
        for rank, channel in self._channels.items():
            try:
                channel.send((name, arguments))
            except OSError:
                self._fail_rank(rank, "has ended")
        return self._replies(self._effort.timeout_s)

    def _replies(self, timeout_s: float) -> list[Any]:
        """Wait for one message from every rank."""
        received: dict[int, Any] = {}
        deadline = time.monotonic() + timeout_s
        while missing := set(self._channels) - set(received):
            ready = wait(self._channels.values(), deadline - time.monotonic())
            if not ready:
                self._fail_rank(min(missing), f"has not answered within {timeout_s:.0f} s")
            for rank, channel in self._channels.items():
                if channel in ready:
                    try:
                        received[rank] = self._take(rank)
                    except (EOFError, OSError):
                        self._fail_rank(rank, "has ended")
        return [received[rank] for rank in range(self._ranks)]

    def _take(self, rank: int) -> Any:
        error, reply = self._channels[rank].recv()
        if error:
            self._fail(f"rank {rank} raised", error)
        return reply

    def _fail_rank(self, rank: int, what: str) -> NoReturn:
        self._launched.wait(_LAST_WORDS_S)  # launchers print the reason when they end
        self._fail(f"rank {rank} {what}")

    def _fail(self, what: str, output: str | None = None) -> NoReturn:
        """Raise an error with the output of a rank; None: of all processes."""
        if output is None:
            output = self._log.read_text(errors="replace").strip()
        name = self.engine.name
        reason = reason_in(output) or what
        lines = [f"{name} {'failed' if self.version else 'failed to start'}: {reason}"]
        if reason != what:
            lines.append(f"{what}:")
        lines += output.splitlines()[-_LOG_LINES:]
        raise EngineError("\n".join(lines), name, reason)

    def prepare(self, case: Case) -> None:
        """Make the arrays of a case, warm up, and find the number of iterations per round."""
        effort = self._effort
        self._times_ns: dict[str, list[int]] = defaultdict(list)  # of all turns, by kind
        reasons = zip(*self.command("prepare", case=case), strict=True)
        self.unsupported, self._no_graph = (next(filter(None, each), "") for each in reasons)
        if self.unsupported:
            return
        if self._no_graph:
            self.command("drop_graph")
        self._time(max(1, effort.warmup))
        if effort.iterations is not None:
            self._iterations = max(1, -(-effort.iterations // effort.rounds))
            return
        round_ns = 1e9 * effort.time_s / effort.rounds
        trial, least_ns = 1, round_ns / 4
        while (trial_ns := self._time(trial)["wall"][0]) < least_ns and trial < _MOST_ITERATIONS:
            trial *= 4
        self._iterations = min(_MOST_ITERATIONS, max(2, int(trial * round_ns / trial_ns)))

    def _time(self, iterations: int) -> dict[str, list[int]]:
        """Time calls; return the slowest rank's times by kind, as `Worker.time` does."""
        ranks = self.command("time", iterations=iterations)
        return {kind: results.slowest_rank([times[kind] for times in ranks]) for kind in ranks[0]}

    def take_turn(self) -> None:
        """Time the calls of a round."""
        # Before the first calls of a turn, the caches hold the data of another engine.
        settle = min(self._effort.warmup, self._iterations)
        for kind, times_ns in self._time(settle + self._iterations).items():
            self._times_ns[kind] += times_ns[settle:]

    def measurement(self) -> Measurement:
        """Check the results, and return the figures of all turns."""
        if self.unsupported:
            return Measurement(self.engine.name, unsupported=self.unsupported)
        times_ns = self._times_ns
        return Measurement(
            self.engine.name,
            p50_us=results.median_us(times_ns["times"]) or 0.0,
            p99_us=results.p99_us(times_ns["times"]) or 0.0,
            iterations=len(times_ns["times"]),
            wrong=sum(self.command("check")),
            host_us=results.median_us(times_ns["host"]),
            host_p99_us=results.p99_us(times_ns["host"]),
            graph_us=results.median_us(times_ns["graph"]),
            no_graph=self._no_graph,
        )

    def close(self) -> None:
        """Let the ranks leave the engine; `kill` ends ranks that do not."""
        with contextlib.suppress(OSError):
            for channel in self._channels.values():
                channel.send(("quit", {}))
        self._launched.wait(_QUIT_S)

    def kill(self) -> None:
        """End the remaining processes at once."""
        self._launched.signal(signal.SIGTERM)
        for channel in self._channels.values():
            channel.close()
        self._launched.wait(_TERMINATE_S)
        for worker in self._workers:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(worker, signal.SIGKILL)
            os.close(worker)
        self._workers.clear()  # an interrupted start kills again
        self._launched.close()
        self._listener.close()


def reason_in(output: str) -> str:
    """Return the line of a failed program's output with the reason; empty without output.

    The last line that names an exception, else the first line with a word in it.
    """
    lines = [_PREFIX.sub("", line).strip() for line in output.splitlines()]
    exceptions = [line for line in lines if _EXCEPTION.match(line)]
    words = [line for line in lines if re.search(r"\w", line)]
    return next(iter([*exceptions[-1:], *words]), "")


class Session:
    """All engines' ranks, from start to end; use it in a `with` statement.

    The first engine is fastdist. Peers that fail to start are left out; `failures` has the errors.
    """

    def __init__(
        self,
        engines: Sequence[Engine],
        ranks: int,
        effort: Effort,
        placement: Placement | None = None,
    ) -> None:
        """Prepare the session; `placement`: GPUs of the ranks, None for arrays on CPUs."""
        self._effort = effort
        self._placement = placement
        self._ranks = ranks
        self._folder = Path(tempfile.mkdtemp(prefix="fastdist-bench-"))
        self._engines = [
            EngineRanks(engine, ranks, self._folder / f"socket{number}", effort)
            for number, engine in enumerate(engines)
        ]
        self._copies_ns: list[int] = []
        self._copy_bytes, self._cache_bytes = _GPU_COPY_BYTES, 0
        if placement is None:
            self._copy_bytes = max(_LEAST_COPY_BYTES, 4 * largest_cache_bytes() // ranks)
            self._cache_bytes = total_cache_bytes()
        self.failures: list[EngineError] = []

    def __enter__(self) -> Session:
        with contextlib.ExitStack() as stack:
            stack.push(self)  # until all have started
            for start in (EngineRanks.launch, self._connect):
                for engine in list(self._engines):
                    try:
                        start(engine)
                    except EngineError as error:
                        if engine is self._engines[0]:
                            raise
                        engine.kill()
                        self._engines.remove(engine)
                        self.failures.append(error)
            stack.pop_all()
        return self

    def _connect(self, engine: EngineRanks) -> None:
        engine.connect()
        cores = sorted(os.sched_getaffinity(0))
        if self._placement is None and self._ranks <= len(cores):
            engine.command("bind", cores=cores)

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        try:
            for engine in self._engines if kind is None else []:
                engine.close()
        finally:
            stops = {signal.SIGINT, signal.SIGTERM}
            before = signal.pthread_sigmask(signal.SIG_BLOCK, stops)  # a second Ctrl-C waits
            for engine in self._engines:
                engine.kill()
            shutil.rmtree(self._folder, ignore_errors=True)
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    @property
    def versions(self) -> dict[str, str]:
        """The version of each engine, by name."""
        return {engine.engine.name: engine.version for engine in self._engines}

    @property
    def copy_gb_per_s(self) -> float:
        """GB/s that all ranks read and write when they copy at the same time, so far."""
        return self._bandwidth(self._copies_ns)

    def _bandwidth(self, copies_ns: Sequence[int]) -> float:
        return 2 * self._ranks * self._copy_bytes / statistics.median_high(copies_ns)

    def measure(self, case: Case, update: Callable[[str, int], object] = lambda *_: None) -> Row:
        """Measure a case on every engine; give `update` its title, and each finished round."""
        update(case.title, 0)
        ours, *_ = self._engines
        for engine in self._engines:
            engine.prepare(case)
        if reason := ours.unsupported:
            raise EngineError(f"fastdist {case.title}: {reason}", "fastdist", reason)
        fits_caches = 0 < results.buffer_bytes(case, self._ranks) <= self._cache_bytes
        needs_copies = not fits_caches or not self._copies_ns  # no floor is shown, once is enough
        copies_ns: list[int] = []
        for _ in range(self._effort.rounds):
            if needs_copies:
                copies = ours.command("copy", nbytes=self._copy_bytes, iterations=_COPIES)
                copies_ns += results.slowest_rank(copies)[1:]
            for engine in self._engines:
                if not engine.unsupported:
                    engine.take_turn()
            update(case.title, 1)
        self._copies_ns += copies_ns
        floor_us = 0.0
        if self._placement is None or self._placement.sharing:
            bandwidth = self._bandwidth(copies_ns or self._copies_ns)
            floor_us = results.floor_us(case, self._ranks, bandwidth)
        first, *others = (engine.measurement() for engine in self._engines)
        return Row(case, self._ranks, floor_us, first, tuple(others), fits_caches)
