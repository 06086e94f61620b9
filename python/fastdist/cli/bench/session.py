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
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from fastdist.cli.bench import results
from fastdist.cli.bench.cases import Case
from fastdist.cli.bench.engine_ranks import EngineError, EngineRanks
from fastdist.cli.bench.peers import Engine
from fastdist.cli.bench.results import Measurement, Placement, Row
from fastdist.cli.machine_facts import largest_cache_bytes, total_cache_bytes

ROUNDS = 5

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
    timeout_s: float = 300.0  # to wait for an answer of an engine


class _Contender:
    """One engine while a case is measured."""

    def __init__(self, ranks: EngineRanks, effort: Effort, case: Case) -> None:
        """Make the arrays, warm up, and find the number of iterations per round."""
        self._ranks = ranks
        self._warmup = effort.warmup
        self._times_ns: dict[str, list[int]] = defaultdict(list)  # of all turns, by kind
        reasons = zip(*ranks.command("prepare", case=case), strict=True)
        self.unsupported, self._no_graph = (next(filter(None, each), "") for each in reasons)
        if self.unsupported:
            return
        if self._no_graph:
            ranks.command("drop_graph")
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
        ranks = self._ranks.command("time", iterations=iterations)
        return {kind: results.slowest_rank([times[kind] for times in ranks]) for kind in ranks[0]}

    def take_turn(self) -> None:
        """Time the calls of a round."""
        # Before the first calls of a turn, the caches hold the data of another engine.
        settle = min(self._warmup, self._iterations)
        for kind, times_ns in self._time(settle + self._iterations).items():
            self._times_ns[kind] += times_ns[settle:]

    def measurement(self) -> Measurement:
        """Check the results, and return the figures of all turns."""
        name = self._ranks.engine.name
        if self.unsupported:
            return Measurement(name, unsupported=self.unsupported)
        times_ns = self._times_ns
        return Measurement(
            name,
            p50_us=results.median_us(times_ns["times"]) or 0.0,
            p99_us=results.p99_us(times_ns["times"]) or 0.0,
            iterations=len(times_ns["times"]),
            wrong=sum(self._ranks.command("check")),
            host_us=results.median_us(times_ns["host"]),
            host_p99_us=results.p99_us(times_ns["host"]),
            graph_us=results.median_us(times_ns["graph"]),
            no_graph=self._no_graph,
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

    def measure(self, case: Case, on_round: Callable[[], None] = lambda: None) -> Row:
        """Measure a case on every engine; call `on_round` after each of `Effort.rounds` rounds."""
        contenders = [_Contender(engine, self._effort, case) for engine in self._engines]
        if reason := contenders[0].unsupported:
            message = f"fastdist {case.collective} of {case.label}: {reason}"
            raise EngineError(message, "fastdist", reason)
        fits_caches = 0 < results.buffer_bytes(case, self._ranks) <= self._cache_bytes
        needs_copies = not fits_caches or not self._copies_ns  # no floor is shown, once is enough
        copies_ns: list[int] = []
        for _ in range(self._effort.rounds):
            if needs_copies:
                copies = self._engines[0].command(
                    "copy", nbytes=self._copy_bytes, iterations=_COPIES
                )
                copies_ns += results.slowest_rank(copies)[1:]
            for contender in contenders:
                if not contender.unsupported:
                    contender.take_turn()
            on_round()
        self._copies_ns += copies_ns
        floor_us = 0.0
        if self._placement is None or self._placement.sharing:
            bandwidth = self._bandwidth(copies_ns or self._copies_ns)
            floor_us = results.floor_us(case, self._ranks, bandwidth)
        ours, *others = (contender.measurement() for contender in contenders)
        return Row(case, self._ranks, floor_us, ours, tuple(others), fits_caches)
