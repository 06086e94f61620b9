"""One engine's call of one case on one rank: its arrays, the timed loop, the check of results.

A call on a GPU enqueues work and returns. Three times are measured separately:

- the time of the work, between two events. The stream is kept busy until all calls of a batch are
  enqueued, so that the GPU never waits for the host between the two events;
- the time of the host, until the call returns, with the stream busy throughout;
- the time of a replay of a graph with the call, between two events.

Before each timed call this rank writes its data, and the streams of all ranks wait for each other.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from time import perf_counter_ns
from typing import Any

from fastdist.cli.bench import verify
from fastdist.cli.bench.cases import COLLECTIVES, ROOT, Case, buffer_elements
from fastdist.cli.bench.driver import Array, Call, Driver
from fastdist.cli.bench.models import gradient_shapes

_SPREAD_NS = 10_000_000
# The calls of a batch, with the fills of their arrays, fit into the queue of a device.
_MOST_IN_BATCH = 32
_FIRST_LEAD, _MOST_LEAD = 32, 500  # copies, which also take places in the device's queue

LEAD_BYTES = 64 << 20


class Batches:
    """Times calls on one GPU, in batches of at most `most`.

    `lead` enqueues a copy. Copies keep the stream busy while the host enqueues a batch.
    """

    def __init__(self, gpu: Any, lead: Call, most: int) -> None:
        self._gpu = gpu
        self._most = most
        self._lead = lead
        self._copies = _FIRST_LEAD
        self._events = [(gpu.event(), gpu.event()) for _ in range(most)]
        self._behind = gpu.event()

    def work_ns(self, prepare: Sequence[Call], call: Call) -> list[int]:
        """Return the time of each call's work in ns; a call of `prepare` precedes each call."""
        times_ns: list[int] = []
        for first in range(0, len(prepare), self._most):
            batch = list(zip(prepare[first : first + self._most], self._events, strict=False))
            with self._batch():
                for before, (start, end) in batch:
                    before()
                    start.record()
                    call()
                    end.record()
            times_ns += [int(start.elapsed_time(end) * 1e6) for _, (start, end) in batch]
        return times_ns

    def host_ns(self, prepare: Call, call: Call, number: int) -> list[int]:
        """Return the time until each call returns in ns; `prepare` precedes each batch."""
        times_ns: list[int] = []
        while len(times_ns) < number:
            with self._batch():
                prepare()
                for _ in range(min(self._most, number - len(times_ns))):
                    called = perf_counter_ns()
                    call()
                    times_ns.append(perf_counter_ns() - called)
        return times_ns

    @contextmanager
    def _batch(self) -> Iterator[None]:
        """Keep the stream busy while calls are enqueued inside; then wait for them.

        The next lead is longer if this lead was too short.
        """
        for _ in range(self._copies):
            self._lead()
        self._behind.record()
        yield
        if self._behind.query():
            self._copies = min(_MOST_LEAD, 2 * self._copies)
        self._gpu.synchronize()


def work_ns(prepare: Sequence[Call], call: Call) -> list[int]:
    """Return the time of each call on the host in ns; a call of `prepare` precedes each call."""
    times_ns = []
    for before in prepare:
        before()
        began = perf_counter_ns()
        call()
        times_ns.append(perf_counter_ns() - began)
    return times_ns


@dataclass(frozen=True, slots=True)
class Times:
    """Times of one rank's calls in nanoseconds."""

    times_ns: list[int]  # of each call; on a GPU, of the enqueued work
    wall_ns: int  # of the whole loop
    host_ns: list[int] = field(default_factory=list)  # until each call returned, on a GPU
    graph_ns: list[int] = field(default_factory=list)  # of each replay of a graph with the call


class MeasuredCall:
    """A case bound to arrays, on a CPU, or on a GPU with the `lead` of `Batches`."""

    def __init__(
        self,
        driver: Driver,
        case: Case,
        lead: Call | None = None,
        graph: bool = False,
    ) -> None:
        self._driver = driver
        self._case = case
        self._library = driver.arrays(case.array)
        self._gets: list[Array] = []
        if case.model:
            shapes = gradient_shapes(case.model)
            self._passes = [self._library.make(shape, case.dtype) for shape in shapes]
            self._call = driver.bind_list(case, self._passes)
        else:
            elements = buffer_elements(case.collective, case.count, driver.rank, driver.world_size)
            self._passes, self._gets = (
                [self._library.make((count,), case.dtype)] if count else [] for count in elements
            )
            passes, gets = next(iter(self._passes), None), next(iter(self._gets), None)
            self._call = driver.bind(case, passes, gets)
        self._fillers = [self._library.filler(array) for array in self._passes]
        self._last_iteration = 0
        self._replay: Call | None = None
        self.no_graph = ""  # reason why the call was not captured in a graph as requested
        self._batches: Batches | None = None
        if lead is not None:
            gpu, most = driver.gpu, _MOST_IN_BATCH // max(1, len(self._passes))
            self._batches = Batches(gpu, lead, max(1, most))
            self._fill(1)
            self._call()  # engines connect in the first call, which cannot be captured
            gpu.synchronize()
            if graph:
                try:
                    self._replay = gpu.capture(self._call)
                except Exception as error:
                    self.no_graph = f"not captured: {type(error).__name__}: {error}"
                gpu.synchronize()

    def _fill(self, value: float) -> None:
        """Set every element of the passed arrays, and wait for the other ranks.

        The data is left in this rank's cache, as by a computation.
        """
        for fill in self._fillers:
            fill(value)
        self._driver.barrier()

    def time(self, iterations: int, graph: bool = False) -> Times:
        """Time `iterations` calls, and with `graph` as many replays. Every rank must call."""
        self._last_iteration = iterations - 1
        rank, world_size, redop = self._driver.rank, self._driver.world_size, self._case.redop
        values = (verify.fill_value(rank, i, world_size, redop) for i in range(iterations))
        prepare = [partial(self._fill, value) for value in values]
        host_ns: list[int] = []
        graph_ns: list[int] = []
        if self._batches is None:
            _spread_ranks()
            self._driver.barrier()
            began = perf_counter_ns()
            times_ns = work_ns(prepare, self._call)
        else:
            self._driver.barrier()
            self._driver.gpu.synchronize()
            began = perf_counter_ns()
            host_ns = self._batches.host_ns(partial(self._fill, 1), self._call, iterations)
            if graph and self._replay is not None:
                graph_ns = self._batches.work_ns(prepare, self._replay)
            # Last, so that the results of these calls are checked.
            times_ns = self._batches.work_ns(prepare, self._call)
        return Times(times_ns, perf_counter_ns() - began, host_ns, graph_ns)

    def wrong_elements(self, graph: bool = False) -> int:
        """Count wrong elements of the last timed call, of one more, and with `graph` of a replay.

        The data of the additional calls differs per element. Every rank must call.
        """
        case, rank, world_size = self._case, self._driver.rank, self._driver.world_size
        if case.collective == "barrier":
            return 0
        wrong = self._differing(
            verify.filled_inputs(world_size, self._last_iteration, case.dtype, case.redop)
        )
        inputs = verify.patterned_inputs(world_size, case.dtype, case.redop)
        for call in (self._call, self._replay if graph else None):
            if call is None:
                continue
            for array, phase in _with_phases(self._passes):
                verify.write_input(self._library, array, inputs, rank, phase)
            for array in self._gets:
                # No right result has 101, so that elements that are not written count as wrong.
                self._library.filler(array)(101)
            self._driver.barrier()
            call()
            wrong += self._differing(inputs)
        return wrong

    def _differing(self, inputs: verify.Inputs) -> int:
        collective, rank = self._case.collective, self._driver.rank
        if collective == "reduce" and rank != ROOT:
            return 0  # only the root has a result
        results = self._gets if COLLECTIVES[collective].gets else self._passes
        return sum(
            verify.count_wrong(self._library, array, collective, rank, inputs, phase)
            for array, phase in _with_phases(results)
        )


def _with_phases(arrays: Sequence[Array]) -> list[tuple[Array, int]]:
    """Pair each array with the number of elements before it, so that all arrays differ."""
    sizes = [math.prod(array.shape) for array in arrays]
    return list(zip(arrays, accumulate(sizes, initial=0), strict=False))


def _spread_ranks() -> None:
    """Keep this rank's core busy until the scheduler has given each rank a core of its own.

    A message wakes ranks on the core of its sender. If they waited for each other there, the calls
    would show the scheduler's time slices and not the speed of the engine.
    """
    end = perf_counter_ns() + _SPREAD_NS
    while perf_counter_ns() < end:
        pass
