"""One engine's call of one case on one rank: its arrays, the timed loop, the check of results."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from time import perf_counter_ns

from fastdist.cli.bench import verify
from fastdist.cli.bench.arrays import Array
from fastdist.cli.bench.cases import Case
from fastdist.cli.bench.collectives import COLLECTIVES, ROOT, buffer_elements
from fastdist.cli.bench.driver import Call, Driver
from fastdist.cli.bench.models import gradient_shapes

_SPREAD_NS = 10_000_000


@dataclass(frozen=True, slots=True)
class Times:
    """Times of one rank's calls in nanoseconds."""

    times_ns: list[int]  # of each call; on a GPU, of the enqueued work
    wall_ns: int  # of the whole loop
    host_ns: list[int] = field(default_factory=list)  # until each call returned, on a GPU
    graph_ns: list[int] = field(default_factory=list)  # of each replay of a graph with the call


class BoundCase(ABC):
    """A case bound to arrays, on a CPU or on a GPU.

    Attributes:
        no_graph: Reason why the call was not captured in a graph; empty if it was captured or no
            graph was requested.
    """

    def __init__(self, driver: Driver, case: Case, variant: str) -> None:
        self._driver = driver
        self._case = case
        self._library = driver.arrays(case.array)
        self._barrier = driver.barrier
        self._gets: list[Array] = []
        if case.model:
            shapes: Sequence[tuple[int, ...]] = gradient_shapes(case.model)
            if variant == "one array":
                shapes = [(case.count,)]
            self._passes = [self._library.make(shape, case.dtype) for shape in shapes]
            self._call = driver.bind_list(case, variant, self._passes)
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
        self.no_graph = ""

    @abstractmethod
    def time(self, iterations: int, graph: bool = False) -> Times:
        """Time `iterations` calls, and with `graph` as many replays. Every rank must call."""

    def _fill_values(self, iterations: int) -> list[int]:
        """Return the value that this rank writes before each of the calls to be timed."""
        self._last_iteration = iterations - 1
        rank, world_size = self._driver.rank, self._driver.world_size
        return [verify.fill_value(rank, i, world_size, self._case.redop) for i in range(iterations)]

    def _fill(self, value: float) -> None:
        """Set every element of the passed arrays."""
        for fill in self._fillers:
            fill(value)

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
            self._barrier()
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


class MeasuredCall(BoundCase):
    """Times calls that have ended when they return."""

    def time(self, iterations: int, graph: bool = False) -> Times:
        _spread_ranks()
        fill, barrier, call = self._fill, self._barrier, self._call
        values = self._fill_values(iterations)
        times_ns = []
        barrier()
        loop_began = perf_counter_ns()
        for value in values:
            fill(value)  # leaves the data in this rank's cache, as a computation does
            barrier()
            began = perf_counter_ns()
            call()
            times_ns.append(perf_counter_ns() - began)
        return Times(times_ns, perf_counter_ns() - loop_began)


def _spread_ranks() -> None:
    """Keep this rank's core busy until the scheduler has given each rank a core of its own.

    A message wakes ranks on the core of its sender. If they waited for each other there, the calls
    would show the scheduler's time slices and not the speed of the engine.
    """
    end = perf_counter_ns() + _SPREAD_NS
    while perf_counter_ns() < end:
        pass
