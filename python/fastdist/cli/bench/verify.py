"""Expected results of collectives, and the number of wrong elements.

Rank r's input is a random sequence of small integers with period `_PERIOD`, a prime, so that a
block in the wrong place, or from the wrong rank, differs from the expected result. Sums of the
integers are exact in every dtype for dozens of ranks. Results are periodic too, so that one short
table holds the expected result of any size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from fastdist.cli.bench.arrays import Array, ArrayLibrary
from fastdist.cli.bench.collectives import ROOT

Table = npt.NDArray[Any]

_PERIOD = 1009
_BLOCK = 1 << 16
_REDUCE = {
    "sum": np.add.reduce,
    "mean": np.add.reduce,
    "prod": np.multiply.reduce,
    "min": np.minimum.reduce,
    "max": np.maximum.reduce,
}


@dataclass(frozen=True, slots=True)
class Inputs:
    """The inputs of all ranks.

    Attributes:
        ranks: One table per rank.
        reduced: Reduction of all tables.
        tolerance: Largest relative error of a right result.
    """

    ranks: tuple[Table, ...]
    reduced: Table
    tolerance: float


def _inputs(ranks: list[Table], dtype: str, redop: str) -> Inputs:
    readable = np.dtype("float32" if dtype == "bfloat16" else dtype)
    tables = tuple(table.astype(readable) for table in ranks)
    epsilon = 2.0**-7 if dtype == "bfloat16" else 0.0
    if not epsilon and readable.kind == "f":
        epsilon = float(np.finfo(readable).eps)
    reduced = tables[0]
    if redop:
        wide = np.float64 if readable.kind == "f" else readable
        total = _REDUCE[redop](np.stack(tables).astype(wide), axis=0)
        if redop == "mean":
            total = total / len(tables)
        reduced = np.asarray(total).astype(readable)
    return Inputs(tables, reduced, 4 * epsilon)


def patterned_inputs(world_size: int, dtype: str, redop: str) -> Inputs:
    """Return inputs that differ per rank and per element."""
    if redop == "prod":  # at most one rank has a 2, so that no world's product overflows
        owner = np.random.default_rng(0).integers(0, world_size + 1, _PERIOD)
        periods = [1 + (owner == rank) for rank in range(world_size)]
    else:
        periods = [
            np.random.default_rng(rank).integers(0, 5, _PERIOD) for rank in range(world_size)
        ]
    return _inputs([np.resize(period, _PERIOD + _BLOCK) for period in periods], dtype, redop)


def fill_value(rank: int, iteration: int, world_size: int, redop: str) -> int:
    """Return the value of a rank's input in a timed call; values differ from call to call."""
    if redop == "prod":
        return 1 + ((rank + iteration) % (world_size + 1) == 0)
    return 1 + (rank + iteration) % 4


def filled_inputs(world_size: int, iteration: int, dtype: str, redop: str) -> Inputs:
    """Return the inputs of a timed call."""
    values = [fill_value(rank, iteration, world_size, redop) for rank in range(world_size)]
    return _inputs([np.full(_PERIOD + _BLOCK, value) for value in values], dtype, redop)


def _blocks(length: int, phase: int) -> Iterator[tuple[int, int, slice]]:
    """Yield (start, stop, part of a table) for the blocks of a sequence from `phase` on."""
    for start in range(0, length, _BLOCK):
        stop = min(start + _BLOCK, length)
        offset = (phase + start) % _PERIOD
        yield start, stop, slice(offset, offset + stop - start)


def write_input(
    library: ArrayLibrary, array: Array, inputs: Inputs, rank: int, phase: int = 0
) -> None:
    """Fill an array with this rank's input, from position `phase` of the sequence on."""
    flat = library.flat(array)
    for start, _, part in _blocks(len(flat), phase):
        library.write(flat, start, inputs.ranks[rank][part])


def _pieces(
    collective: str, rank: int, inputs: Inputs, length: int
) -> Iterator[tuple[int, Table, int]]:
    """Yield the pieces of a rank's expected result as (elements, table, phase)."""
    world_size = len(inputs.ranks)
    block = length // world_size
    if collective in ("all_reduce", "reduce"):
        yield length, inputs.reduced, 0
    elif collective == "broadcast":
        yield length, inputs.ranks[ROOT], 0
    elif collective in ("all_gather", "gather"):
        yield from ((block, table, 0) for table in inputs.ranks)
    elif collective == "scatter":
        yield length, inputs.ranks[ROOT], rank * length
    elif collective == "reduce_scatter":
        yield length, inputs.reduced, rank * length
    elif collective == "all_to_all":
        yield from ((block, table, rank * block) for table in inputs.ranks)
    elif collective == "send_recv":
        yield length, inputs.ranks[(rank - 1) % world_size], 0
    else:
        raise ValueError(f"no expected result for collective {collective!r}")


def count_wrong(
    library: ArrayLibrary,
    array: Array,
    collective: str,
    rank: int,
    inputs: Inputs,
    phase: int = 0,
) -> int:
    """Count the wrong elements of a rank's result."""
    flat = library.flat(array)
    wrong = 0
    begin = 0
    for length, table, piece_phase in _pieces(collective, rank, inputs, len(flat)):
        for start, stop, part in _blocks(length, phase + piece_phase):
            got = library.read(flat, begin + start, begin + stop)
            wrong += _differing(got, table[part], inputs.tolerance)
        begin += length
    return wrong


def _differing(got: Table, expected: Table, tolerance: float) -> int:
    if np.array_equal(got, expected):
        return 0
    if not tolerance:
        return int(np.count_nonzero(got != expected))
    error = np.abs(got - expected, dtype=np.float64)
    return int(np.count_nonzero(~(error <= tolerance * np.abs(expected))))
