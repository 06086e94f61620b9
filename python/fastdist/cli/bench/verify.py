"""Expected results of collectives, and the number of wrong elements.

Rank r's input is a random sequence of small integers with period `_PERIOD`, a prime, so that a
block in the wrong place, or from the wrong rank, differs from the expected result. Sums of the
integers are exact in every dtype for dozens of ranks. Results are periodic too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from fastdist.cli.bench.cases import ROOT
from fastdist.cli.bench.drivers import Array, ArrayLibrary

Period = npt.NDArray[Any]
Part = tuple[Period, int]  # what it repeats, from which element on

_PERIOD = 1009
_PIECE = 1 << 16  # elements that are written or compared at once


class Inputs:
    """One period of the inputs of all ranks."""

    def __init__(self, periods: Sequence[Period], dtype: str, redop: str) -> None:
        readable = np.dtype("float32" if dtype == "bfloat16" else dtype)
        # The period of each rank, the largest relative error of a right result, and the reduction.
        self.ranks = [np.resize(each, _PERIOD).astype(readable) for each in periods]
        is_float = readable.kind == "f"
        epsilon = float(np.finfo(readable).eps) if is_float else 0.0
        self.tolerance = 4 * (2.0**-7 if dtype == "bfloat16" else epsilon)
        self.reduced = self.ranks[0]
        if redop:
            stacked = np.stack(self.ranks).astype(np.float64 if is_float else readable)
            self.reduced = np.asarray(getattr(np, redop)(stacked, axis=0)).astype(readable)


def patterned_inputs(world_size: int, dtype: str, redop: str) -> Inputs:
    """Return inputs that differ per rank and per element."""
    ranks = range(world_size)
    periods = [np.random.default_rng(rank).integers(0, 5, _PERIOD) for rank in ranks]
    if redop == "prod":  # at most one rank has a 2, so that no world's product overflows
        owner = np.random.default_rng(0).integers(0, world_size + 1, _PERIOD)
        periods = [1 + (owner == rank) for rank in ranks]
    return Inputs(periods, dtype, redop)


def fill_value(rank: int, iteration: int, world_size: int, redop: str) -> int:
    """Return the value of a rank's input in a timed call; values differ from call to call."""
    if redop == "prod":
        return 1 + ((rank + iteration) % (world_size + 1) == 0)
    return 1 + (rank + iteration) % 4


def filled_inputs(world_size: int, iteration: int, dtype: str, redop: str) -> Inputs:
    """Return the inputs of a timed call."""
    values = [fill_value(rank, iteration, world_size, redop) for rank in range(world_size)]
    return Inputs([np.array([value]) for value in values], dtype, redop)


def _pieces(length: int, parts: Sequence[Part]) -> Iterator[tuple[slice, Period]]:
    """Yield pieces of an array of equal parts, and the elements of each."""
    length //= len(parts)
    for number, (period, first) in enumerate(parts):
        for start in range(0, length, _PIECE):
            begin, end = number * length + start, number * length + min(start + _PIECE, length)
            yield slice(begin, end), np.resize(np.roll(period, -first - start), end - begin)


def write_input(library: ArrayLibrary, arrays: Sequence[Array], inputs: Inputs, rank: int) -> None:
    """Fill a list of arrays, one after the other, with this rank's input."""
    begin = 0
    for flat in (array.reshape(-1) for array in arrays):
        for piece, elements in _pieces(len(flat), [(inputs.ranks[rank], begin)]):
            library.write(flat[piece], elements)
        begin += len(flat)


def _parts(collective: str, rank: int, inputs: Inputs, begin: int, length: int) -> list[Part]:
    """Return the parts of a rank's result, of a list from element `begin` on."""
    if collective in ("all_gather", "gather", "all_to_all"):
        first = rank * (length // len(inputs.ranks)) if collective == "all_to_all" else 0
        return [(period, first) for period in inputs.ranks]
    return {
        "all_reduce": [(inputs.reduced, begin)],
        "reduce": [(inputs.reduced, 0)],
        "broadcast": [(inputs.ranks[ROOT], 0)],
        "scatter": [(inputs.ranks[ROOT], rank * length)],
        "reduce_scatter": [(inputs.reduced, rank * length)],
        "send_recv": [(inputs.ranks[rank - 1], 0)],
    }[collective]


def count_wrong(
    library: ArrayLibrary, arrays: Sequence[Array], collective: str, rank: int, inputs: Inputs
) -> int:
    """Count the wrong elements of a rank's results, of one array or of a list."""
    wrong = begin = 0
    for flat in (array.reshape(-1) for array in arrays):
        parts = _parts(collective, rank, inputs, begin, len(flat))
        for piece, expected in _pieces(len(flat), parts):
            got = library.read(flat[piece])
            if not np.array_equal(got, expected):  # several times as fast as the tolerance
                error = np.abs(got - expected, dtype=np.float64)
                is_right = error <= inputs.tolerance * np.abs(expected)
                wrong += int(np.count_nonzero(~is_right))
        begin += len(flat)
    return wrong
