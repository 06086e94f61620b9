"""One engine's call of one case on one rank: its arrays, the timed loop, and the check."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from time import perf_counter_ns

from fastdist.cli.bench.arrays import Array
from fastdist.cli.bench.cases import Case
from fastdist.cli.bench.collectives import COLLECTIVES, buffer_elements
from fastdist.cli.bench.driver import Call, Driver
from fastdist.cli.bench.models import gradient_shapes
from fastdist.cli.bench.verify import (
    Inputs,
    count_wrong,
    fill_value,
    filled_inputs,
    patterned_inputs,
    write_input,
)

_SPREAD_NS = 10_000_000


class MeasuredCall:
    """Holds the arrays of a case and the call on them until it is dropped."""

    def __init__(self, driver: Driver, case: Case, variant: str) -> None:
        self._driver = driver
        self._case = case
        self._library = driver.arrays(case.array)
        self._barrier = driver.barrier_call()
        if case.model:
            self._passes = self._make_list(variant)
            self._gets: list[Array] = []
            self._call = driver.bind_list(case, variant, self._passes)
        else:
            self._passes, self._gets = self._make_buffers()
            self._call = driver.bind(case, _only(self._passes), _only(self._gets))
        self._fillers = [self._library.filler(array) for array in self._passes]
        self._last_iteration = 0

    def _make_list(self, variant: str) -> list[Array]:
        shapes: Sequence[tuple[int, ...]] = gradient_shapes(self._case.model)
        if variant == "one array":
            shapes = [(sum(math.prod(shape) for shape in shapes),)]
        return [self._library.make(shape, self._case.dtype) for shape in shapes]

    def _make_buffers(self) -> tuple[list[Array], list[Array]]:
        case, driver = self._case, self._driver
        elements = buffer_elements(case.collective, case.count, driver.rank, driver.world_size)
        passes, gets = (
            [self._library.make((count,), case.dtype)] if count else [] for count in elements
        )
        return passes, gets

    def time(self, iterations: int) -> tuple[list[int], int]:
        """Runs the call so often. Every rank must call.

        Returns:
            Nanoseconds of each call, and of everything including what is around them.
        """
        case, rank, world_size = self._case, self._driver.rank, self._driver.world_size
        _spread_ranks()
        values = [fill_value(rank, i, world_size, case.redop) for i in range(iterations)]
        self._last_iteration = iterations - 1
        self._barrier()
        began = perf_counter_ns()
        times_ns = _timed_loop(self._filler(), self._barrier, self._call, values)
        return times_ns, perf_counter_ns() - began

    def _filler(self) -> Callable[[float], object]:
        if len(self._fillers) == 1:
            return self._fillers[0]

        def fill_all(value: float) -> None:
            for fill in self._fillers:
                fill(value)

        return fill_all

    def wrong_elements(self) -> int:
        """Wrong elements of the last timed call, and of one more on data that differs per element.

        Every rank must call.
        """
        case, world_size = self._case, self._driver.world_size
        if case.collective == "barrier":
            return 0
        wrong = self._differing(
            filled_inputs(world_size, self._last_iteration, case.dtype, case.redop)
        )
        inputs = patterned_inputs(world_size, case.dtype, case.redop)
        for array, phase in _with_phases(self._passes):
            write_input(self._library, array, inputs, self._driver.rank, phase)
        for array in self._gets:
            self._library.filler(array)(101)  # not in any result: what is left over is seen
        self._barrier()
        self._call()
        return wrong + self._differing(inputs)

    def _differing(self, inputs: Inputs) -> int:
        in_place = COLLECTIVES[self._case.collective].in_place
        if self._case.collective == "reduce" and self._driver.rank:
            return 0  # only the root has a result
        return sum(
            count_wrong(
                self._library, array, self._case.collective, self._driver.rank, inputs, phase
            )
            for array, phase in _with_phases(self._passes if in_place else self._gets)
        )


def _spread_ranks() -> None:
    """Keeps this rank's core busy until the scheduler has given each rank a core of its own.

    A message wakes ranks on the core that it came from; where they then wait for each other in a
    loop, a call lasts as long as the scheduler's turns, which says nothing about the engine.
    """
    end = perf_counter_ns() + _SPREAD_NS
    while perf_counter_ns() < end:
        pass


def _timed_loop(
    fill: Callable[[float], object], barrier: Call, call: Call, values: Sequence[int]
) -> list[int]:
    times_ns = []
    for value in values:
        fill(value)  # the data is where a computation would have left it: with this rank
        barrier()
        began = perf_counter_ns()
        call()
        times_ns.append(perf_counter_ns() - began)
    return times_ns


def _with_phases(arrays: Sequence[Array]) -> list[tuple[Array, int]]:
    """Each array with the number of elements before it, so that all of a list differ."""
    result = []
    before = 0
    for array in arrays:
        result.append((array, before))
        before += math.prod(array.shape)
    return result


def _only(arrays: Sequence[Array]) -> Array | None:
    return arrays[0] if arrays else None
