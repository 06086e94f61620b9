"""The call of one case by one engine on one rank, with its arrays and the check of results."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

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


class BoundCase:
    """The collective `call` on the arrays of a case, of which `arrays` are passed."""

    def __init__(self, driver: Driver, case: Case, variant: str) -> None:
        self._driver = driver
        self._case = case
        self._library = driver.arrays(case.array)
        self.barrier = driver.barrier_call()
        if case.model:
            self._passes = self._make_list(variant)
            self._gets: list[Array] = []
            self.call = driver.bind_list(case, variant, self._passes)
        else:
            self._passes, self._gets = self._make_buffers()
            passes, gets = next(iter(self._passes), None), next(iter(self._gets), None)
            self.call = driver.bind(case, passes, gets)
        self._fillers = [self._library.filler(array) for array in self._passes]
        self.arrays = len(self._passes)

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

    def fill_values(self, iterations: int) -> list[int]:
        """Return the value that this rank writes before each call."""
        case, driver = self._case, self._driver
        return [
            fill_value(driver.rank, i, driver.world_size, case.redop) for i in range(iterations)
        ]

    def fill(self, value: float) -> None:
        """Set every element of the passed arrays."""
        for fill in self._fillers:
            fill(value)

    def wrong_elements(self, last_iteration: int, calls: Sequence[Call]) -> int:
        """Count wrong elements of the last timed call, and of one more run of each of `calls`.

        The data of the additional runs differs per element. Every rank must call.
        """
        case, world_size = self._case, self._driver.world_size
        if case.collective == "barrier":
            return 0
        wrong = self._differing(filled_inputs(world_size, last_iteration, case.dtype, case.redop))
        inputs = patterned_inputs(world_size, case.dtype, case.redop)
        for call in calls:
            for array, phase in with_phases(self._passes):
                write_input(self._library, array, inputs, self._driver.rank, phase)
            for array in self._gets:
                # No right result has 101, so that elements that are not written count as wrong.
                self._library.filler(array)(101)
            self.barrier()
            call()
            wrong += self._differing(inputs)
        return wrong

    def _differing(self, inputs: Inputs) -> int:
        in_place = COLLECTIVES[self._case.collective].in_place
        if self._case.collective == "reduce" and self._driver.rank:
            return 0  # only the root has a result
        return sum(
            count_wrong(
                self._library, array, self._case.collective, self._driver.rank, inputs, phase
            )
            for array, phase in with_phases(self._passes if in_place else self._gets)
        )


def with_phases(arrays: Sequence[Array]) -> list[tuple[Array, int]]:
    """Pair each array with the number of elements before it, so that all arrays differ."""
    sizes = [math.prod(array.shape) for array in arrays]
    return list(zip(arrays, itertools.accumulate(sizes, initial=0), strict=False))
