"""Runs cases on all engines side by side.

Every engine's ranks are started once and stay alive, blocked on their channel while another engine
is measured. A case is measured in rounds. In every round all engines take turns, so that other load
of the machine slows all engines equally. The copy bandwidth for the floor is measured in the same
rounds.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastdist.cli.bench import results
from fastdist.cli.bench.cases import Case
from fastdist.cli.bench.engine_ranks import EngineError, EngineRanks
from fastdist.cli.bench.gpu import Placement
from fastdist.cli.bench.measured_call import Times
from fastdist.cli.bench.peers import Engine
from fastdist.cli.bench.results import Measurement, Row
from fastdist.cli.machine_facts import largest_cache_bytes, total_cache_bytes

ROUNDS = 5

_START_TIMEOUT_S = 120.0
_COPIES = 4  # per round; the first is not counted
_LEAST_COPY_BYTES = 64 << 20
_GPU_COPY_BYTES = 512 << 20  # several times the cache of any GPU
_MOST_ITERATIONS = 20_000  # per round


@dataclass(frozen=True, slots=True)
class Effort:
    """The effort per case and engine."""

    time_s: float = 1.0  # to spend, if `iterations` is None
    iterations: int | None = None  # timed calls; None: as many as fit in `time_s`
    warmup: int = 5  # calls before the timed calls
    rounds: int = ROUNDS  # turns of each engine
    bind: bool = True  # each rank to a core of its own, if there are enough cores
    timeout_s: float = 300.0  # to wait for an answer of an engine
    graph: bool = False  # on GPUs: also replay a graph with the call


@dataclass(slots=True)
class _Contender:
    """One engine while a case is measured."""

    processes: EngineRanks
    effort: Effort
    iterations: int = 0
    slowest: Times = field(default_factory=lambda: Times([], 0))  # of all turns
    wrong: int = 0
    unsupported: str = ""
    no_graph: str = ""

    def command(self, name: str, **arguments: object) -> list[Any]:
        graph = self.effort.graph and not self.no_graph
        return self.processes.command(name, graph=graph, **arguments)

    def prepare(self, case: Case) -> None:
        """Make the arrays, warm up, and find the number of iterations per round."""
        replies = self.command("prepare", case=case)
        self.unsupported = next((r["unsupported"] for r in replies if "unsupported" in r), "")
        if self.unsupported:
            return
        self.no_graph = next((r["no_graph"] for r in replies if r["no_graph"]), "")
        self.command("time", iterations=max(1, self.effort.warmup))
        if self.effort.iterations is not None:
            self.iterations = max(1, -(-self.effort.iterations // self.effort.rounds))
            return
        round_s = self.effort.time_s / self.effort.rounds
        trial = 1
        while (trial_s := self._wall_s(trial)) < round_s / 4 and trial < _MOST_ITERATIONS:
            trial *= 4
        self.iterations = min(_MOST_ITERATIONS, max(2, int(trial * round_s / trial_s)))

    def _wall_s(self, iterations: int) -> float:
        ranks: list[Times] = self.command("time", iterations=iterations)
        return max(times.wall_ns for times in ranks) / 1e9

    def time(self) -> None:
        """Take a turn."""
        # Before the first calls of a turn, the caches hold the data of another engine.
        settle = min(self.effort.warmup, self.iterations)
        ranks: list[Times] = self.command("time", iterations=settle + self.iterations)
        for name in ("times_ns", "host_ns", "graph_ns"):
            slowest = results.slowest_rank([getattr(times, name) for times in ranks])
            getattr(self.slowest, name).extend(slowest[settle:])

    def measurement(self) -> Measurement:
        """Return the figures of all turns."""
        name = self.processes.engine.name
        if self.unsupported:
            return Measurement(name, unsupported=self.unsupported)
        times = self.slowest
        return Measurement(
            name,
            p50_us=results.median_us(times.times_ns) or 0.0,
            p99_us=results.p99_us(times.times_ns) or 0.0,
            iterations=len(times.times_ns),
            wrong=self.wrong,
            host_us=results.median_us(times.host_ns),
            host_p99_us=results.p99_us(times.host_ns),
            graph_us=results.median_us(times.graph_ns),
            no_graph=self.no_graph,
        )


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
            EngineRanks(engine, ranks, self._folder / f"socket{number}", effort.timeout_s)
            for number, engine in enumerate(engines)
        ]
        self._copies_ns: list[int] = []
        if placement is None:
            self._copy_bytes = max(_LEAST_COPY_BYTES, 4 * largest_cache_bytes() // ranks)
            self._cache_bytes = total_cache_bytes()
        else:
            self._copy_bytes, self._cache_bytes = _GPU_COPY_BYTES, 0
        self.failures: list[EngineError] = []

    def __enter__(self) -> Session:
        try:
            self._start()
        except BaseException:
            self._end(kill=True)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self._end(kill=kind is not None)

    def _start(self) -> None:
        deadline = time.monotonic() + _START_TIMEOUT_S
        for engine in list(self._engines):
            with self._may_fail(engine):
                engine.launch()
        cores = sorted(os.sched_getaffinity(0))
        for engine in list(self._engines):
            with self._may_fail(engine):
                engine.connect(_START_TIMEOUT_S, deadline)
                if self._effort.bind and self._ranks <= len(cores):
                    engine.command("bind", cores=cores)

    @contextlib.contextmanager
    def _may_fail(self, engine: EngineRanks) -> Iterator[None]:
        """Remove a peer that fails to start; raise if fastdist fails."""
        try:
            yield
        except EngineError as error:
            if engine is self._engines[0]:
                raise
            engine.kill()
            self._engines.remove(engine)
            self.failures.append(error)

    def _end(self, kill: bool) -> None:
        try:
            for engine in [] if kill else self._engines:
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

    def measure(self, case: Case, on_round: Callable[[], None] = lambda: None) -> Row:
        """Measure a case on every engine; call `on_round` after each of `Effort.rounds` rounds."""
        contenders = [_Contender(engine, self._effort) for engine in self._engines]
        for contender in contenders:
            contender.prepare(case)
        if reason := contenders[0].unsupported:
            message = f"fastdist {case.collective} of {case.label}: {reason}"
            raise EngineError(message, "fastdist", reason)
        running = [contender for contender in contenders if not contender.unsupported]
        fits_caches = 0 < results.buffer_bytes(case, self._ranks) <= self._cache_bytes
        needs_copies = not fits_caches or not self._copies_ns  # no floor is shown, once is enough
        copies_ns: list[int] = []
        for _ in range(self._effort.rounds):
            if needs_copies:
                copies = self._engines[0].command(
                    "copy", nbytes=self._copy_bytes, iterations=_COPIES
                )
                copies_ns += results.slowest_rank(copies)[1:]
            for contender in running:
                contender.time()
            on_round()
        for contender in running:
            contender.wrong = sum(contender.command("check"))
        for engine in self._engines:
            engine.command("release")
        self._copies_ns += copies_ns
        ours, *others = (contender.measurement() for contender in contenders)
        floor = self._floor_us(case, copies_ns or self._copies_ns)
        return Row(case, self._ranks, floor, ours, tuple(others), fits_caches)

    def _floor_us(self, case: Case, copies_ns: Sequence[int]) -> float:
        if self._placement is not None and not self._placement.is_shared:
            return 0.0
        return results.floor_us(case, self._ranks, self._bandwidth(copies_ns))
