"""Runs cases on all engines side by side.

Every engine's ranks are started once and stay alive, blocked on their channel while another engine
is measured. A case is measured in rounds. In every round all engines take turns, so that other load
of the machine slows all engines equally. The copy bandwidth for the floor is measured in the same
rounds.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from fastdist.cli.bench.cases import Case
from fastdist.cli.bench.channel import Channel, ChannelClosedError, Message
from fastdist.cli.bench.driver import LIST_VARIANTS
from fastdist.cli.bench.engine_ranks import EngineError, EngineRanks
from fastdist.cli.bench.machine import largest_cache_bytes, total_cache_bytes
from fastdist.cli.bench.peers import Engine
from fastdist.cli.bench.placement import Placement
from fastdist.cli.bench.results import (
    Measurement,
    Row,
    buffer_bytes,
    floor_us,
    link_us,
    measurement,
    median_us,
    p99_ns,
    slowest_rank,
)

ROUNDS = 5

_START_TIMEOUT_S = 120.0
_POLL_S = 0.2
_COPIES = 4  # per round; the first is not counted
_LEAST_COPY_BYTES = 64 << 20
_GPU_COPY_BYTES = 512 << 20  # several times the cache of any GPU
_MOST_ITERATIONS = 20_000  # per round


@dataclass(frozen=True, slots=True)
class Effort:
    """The effort per case and engine.

    Attributes:
        time_s: Seconds to spend, if `iterations` is None.
        iterations: Number of timed calls; None: as many as fit in `time_s`.
        warmup: Number of calls before the timed calls.
        rounds: Number of turns of each engine.
        check: Verify results.
        bind: Bind each rank to a core of its own, if there are enough cores.
        timeout_s: Seconds to wait for an answer of an engine.
        graph: On GPUs: also replay a graph with the call.
    """

    time_s: float = 1.0
    iterations: int | None = None
    warmup: int = 5
    rounds: int = ROUNDS
    check: bool = True
    bind: bool = True
    timeout_s: float = 300.0
    graph: bool = False


@dataclass(slots=True)
class _Contender:
    """One engine, or one of its ways to reduce a list, while a case is measured."""

    processes: EngineRanks
    variant: str
    iterations: int = 0
    times_ns: list[int] = field(default_factory=list)
    host_ns: list[int] = field(default_factory=list)
    graph_ns: list[int] = field(default_factory=list)
    wrong: int | None = None
    unsupported: str = ""
    no_graph: str = ""

    @property
    def name(self) -> str:
        engine = self.processes.engine.name
        return f"{engine}: {self.variant}" if self.variant else engine


class Session:
    """All engines' ranks, from start to end; use it in a `with` statement.

    The first engine is fastdist. Peers that fail to start are left out.

    Attributes:
        failures: errors of the peers that failed to start.
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
        self._socket_path = self._folder / "socket"
        self._engines = [EngineRanks(engine, ranks, self._socket_path) for engine in engines]
        self._copy_bytes = (
            max(_LEAST_COPY_BYTES, 4 * largest_cache_bytes() // ranks)
            if placement is None
            else _GPU_COPY_BYTES
        )
        self._copies_ns: list[int] = []
        self._cache_bytes = total_cache_bytes() if placement is None else 0
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
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(str(self._socket_path))
            listener.listen(self._ranks * len(self._engines))
            for engine in list(self._engines):
                with self._may_fail(engine):
                    engine.launch()
            self._accept(listener)
        cores = sorted(os.sched_getaffinity(0))
        bind = {"command": "bind", "cores": cores}
        for engine in list(self._engines):
            with self._may_fail(engine):
                ready = engine.replies(_START_TIMEOUT_S)
                engine.version = str(ready[0]["ready"])
                if self._effort.bind and self._ranks <= len(cores):
                    engine.command(bind, self._effort.timeout_s)

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

    def _accept(self, listener: socket.socket) -> None:
        deadline = time.monotonic() + _START_TIMEOUT_S
        with selectors.DefaultSelector() as selector:
            selector.register(listener, selectors.EVENT_READ)
            while missing := [engine for engine in self._engines if not engine.connected]:
                # Connections first: a rank that has ended may have sent its error.
                if selector.select(_POLL_S):
                    connection, _ = listener.accept()
                    self._adopt(connection)
                    continue
                for engine in missing:
                    with self._may_fail(engine):
                        engine.require_alive()
                        if time.monotonic() > deadline:
                            engine.fail_late(_START_TIMEOUT_S)

    def _adopt(self, connection: socket.socket) -> None:
        """Give the connection of a rank to its engine."""
        channel = Channel(connection)
        try:
            hello = channel.receive()
        except ChannelClosedError:
            return  # its launcher reports the error
        for engine in list(self._engines):
            if engine.engine.name == hello["engine"]:
                with self._may_fail(engine):
                    engine.adopt(int(hello["rank"]), connection, channel)
                return
        channel.close()  # the engine has failed since

    def _end(self, kill: bool) -> None:
        try:
            for engine in self._engines:
                if not kill:
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
        ordered = sorted(copies_ns)
        return 2 * self._ranks * self._copy_bytes / ordered[len(ordered) // 2]

    def measure(self, case: Case, on_round: Callable[[], None] = lambda: None) -> Row:
        """Measure one case on every engine.

        Args:
            case: Case to measure.
            on_round: Function to call after each of `Effort.rounds` rounds.

        Raises:
            EngineError: A rank failed, or fastdist does not support the case.
        """
        contenders = [
            _Contender(engine, variant)
            for engine in self._engines
            for variant in (LIST_VARIANTS[engine.engine.driver] if case.model else ("",))
        ]
        running = [contender for contender in contenders if self._prepare(contender, case)]
        if contenders[0].unsupported:
            reason = contenders[0].unsupported
            raise EngineError(
                f"fastdist {case.collective} of {case.label}: {reason}", "fastdist", reason
            )
        fits_caches = 0 < buffer_bytes(case, self._ranks) <= self._cache_bytes
        needs_copies = not fits_caches or not self._copies_ns  # no floor is shown, once is enough
        copies_ns: list[int] = []
        for _ in range(self._effort.rounds):
            if needs_copies:
                copies_ns += self._time_copies()
            for contender in running:
                self._time(contender)
            on_round()
        for contender in running:
            if self._effort.check:
                replies = self._command(contender, "check", graph=self._graphs(contender))
                contender.wrong = sum(int(reply["wrong"]) for reply in replies)
        for engine in self._engines:
            engine.command({"command": "release"}, self._effort.timeout_s)
        self._copies_ns += copies_ns
        ours, *others = (self._measurement(contender, case) for contender in contenders)
        floor = self._floor_us(case, copies_ns or self._copies_ns)
        return Row(case, floor, ours, tuple(others), fits_caches)

    def _floor_us(self, case: Case, copies_ns: Sequence[int]) -> float:
        if self._placement is not None and not self._placement.is_shared:
            return link_us(case, self._ranks, self._placement.link_gb_per_s)
        return floor_us(case, self._ranks, self._bandwidth(copies_ns))

    def _graphs(self, contender: _Contender) -> bool:
        return self._effort.graph and not contender.no_graph

    def _command(self, contender: _Contender, command: str, **arguments: object) -> list[Message]:
        message = {"command": command, "variant": contender.variant, **arguments}
        return contender.processes.command(message, self._effort.timeout_s)

    def _prepare(self, contender: _Contender, case: Case) -> bool:
        fields = {name: getattr(case, name) for name in case.__slots__}
        replies = self._command(contender, "prepare", case=fields, graph=self._effort.graph)
        reasons = [str(reply["unsupported"]) for reply in replies if "unsupported" in reply]
        if reasons:
            contender.unsupported = reasons[0]
            return False
        contender.no_graph = next(filter(None, (str(reply["no_graph"]) for reply in replies)), "")
        contender.iterations = self._iterations(contender)
        return True

    def _iterations(self, contender: _Contender) -> int:
        """Warm up; return the number of iterations per round."""
        effort = self._effort
        self._timed(contender, max(1, effort.warmup))
        if effort.iterations is not None:
            return max(1, -(-effort.iterations // effort.rounds))
        round_s = effort.time_s / effort.rounds
        trial = 1
        while (trial_s := self._wall_s(contender, trial)) < round_s / 4:
            if trial >= _MOST_ITERATIONS:
                break
            trial *= 4
        return min(_MOST_ITERATIONS, max(2, int(trial * round_s / trial_s)))

    def _wall_s(self, contender: _Contender, iterations: int) -> float:
        replies = self._timed(contender, iterations)
        return max(int(reply["wall_ns"]) for reply in replies) / 1e9

    def _time(self, contender: _Contender) -> None:
        # Before the first calls of a turn, the caches hold the data of another engine.
        settle = min(self._effort.warmup, contender.iterations)
        replies = self._timed(contender, settle + contender.iterations)
        for name, times_ns in (
            ("times_ns", contender.times_ns),
            ("host_ns", contender.host_ns),
            ("graph_ns", contender.graph_ns),
        ):
            times_ns += slowest_rank([reply[name] for reply in replies])[settle:]

    def _timed(self, contender: _Contender, iterations: int) -> list[Message]:
        graph = self._graphs(contender)
        return self._command(contender, "time", iterations=iterations, graph=graph)

    def _time_copies(self) -> list[int]:
        message = {"command": "copy", "bytes": self._copy_bytes, "iterations": _COPIES}
        replies = self._engines[0].command(message, self._effort.timeout_s)
        return slowest_rank([reply["times_ns"] for reply in replies])[1:]

    def _measurement(self, contender: _Contender, case: Case) -> Measurement:
        if contender.unsupported:
            return Measurement(contender.name, unsupported=contender.unsupported)
        figures = measurement(
            contender.name, case, self._ranks, contender.times_ns, contender.wrong
        )
        return replace(
            figures,
            host_us=median_us(contender.host_ns),
            host_p99_us=p99_ns(contender.host_ns) / 1e3 if contender.host_ns else None,
            graph_us=median_us(contender.graph_ns),
            no_graph=contender.no_graph,
        )
