"""Expected results of collectives, and the number of wrong elements.

Rank r's input is a random sequence of small integers with period `_PERIOD`, a prime, so that a
block in the wrong place, or from the wrong rank, differs from the expected result. Sums of the
integers are exact in every dtype for dozens of ranks. Results are periodic too, so that one short
table holds the expected result of any size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from fastdist.cli.bench.cases import ROOT
from fastdist.cli.bench.drivers import Array, ArrayLibrary

Table = npt.NDArray[Any]
Piece = tuple[int, Table, int]  # elements of an array, their table, and the phase

_PERIOD = 1009
_BLOCK = 1 << 16


class Inputs:
    """The inputs of all ranks, in tables that repeat a period.

    Attributes:
        ranks: One table per rank.
        reduced: The reduction of all tables.
        tolerance: Largest relative error of a right result.
    """

    def __init__(self, periods: Sequence[Table], dtype: str, redop: str) -> None:
        readable = np.dtype("float32" if dtype == "bfloat16" else dtype)
        self.ranks = [np.resize(each, _PERIOD + _BLOCK).astype(readable) for each in periods]
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


def _blocks(pieces: Sequence[Piece], phase: int) -> Iterator[tuple[slice, Table]]:
    """Yield the parts of an array of `pieces`, in a sequence from `phase`, and their content."""
    begin = 0
    for length, table, piece_phase in pieces:
        for start in range(0, length, _BLOCK):
            count = min(_BLOCK, length - start)
            offset = (phase + piece_phase + start) % _PERIOD
            yield slice(begin + start, begin + start + count), table[offset : offset + count]
        begin += length


def write_input(library: ArrayLibrary, arrays: Sequence[Array], inputs: Inputs, rank: int) -> None:
    """Fill a list of arrays, one after the other, with this rank's input."""
    phase = 0
    for flat in (array.reshape(-1) for array in arrays):
        for part, block in _blocks([(len(flat), inputs.ranks[rank], 0)], phase):
            library.write(flat[part], block)
        phase += len(flat)


def _pieces(collective: str, rank: int, inputs: Inputs, length: int) -> list[Piece]:
    block = length // len(inputs.ranks)
    reduced, passed_by_root = inputs.reduced, inputs.ranks[ROOT]
    gathered = [(block, table, 0) for table in inputs.ranks]
    return {
        "all_reduce": [(length, reduced, 0)],
        "reduce": [(length, reduced, 0)],
        "broadcast": [(length, passed_by_root, 0)],
        "all_gather": gathered,
        "gather": gathered,
        "scatter": [(length, passed_by_root, rank * length)],
        "reduce_scatter": [(length, reduced, rank * length)],
        "all_to_all": [(block, table, rank * block) for table in inputs.ranks],
        "send_recv": [(length, inputs.ranks[rank - 1], 0)],
    }[collective]


def count_wrong(
    library: ArrayLibrary, arrays: Sequence[Array], collective: str, rank: int, inputs: Inputs
) -> int:
    """Count the wrong elements of a rank's results, of one array or of a list."""
    wrong = phase = 0
    for flat in (array.reshape(-1) for array in arrays):
        for part, expected in _blocks(_pieces(collective, rank, inputs, len(flat)), phase):
            got = library.read(flat[part])
            if np.array_equal(got, expected):  # several times as fast as the tolerance
                continue
            if inputs.tolerance:
                error = np.abs(got - expected, dtype=np.float64)
                is_right = error <= inputs.tolerance * np.abs(expected)
            else:
                is_right = got == expected
            wrong += int(np.count_nonzero(~is_right))
        phase += len(flat)
    return wrong
