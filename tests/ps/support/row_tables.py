"""Small things that the tests of tables and dense variables share."""

from __future__ import annotations

from typing import Any

import fastdist._core as _core
import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]
Given = dict[str, Any]

SGD = _core.UpdateRule("SGD", lr=0.5)


def floats(rng: np.random.Generator, *shape: int) -> Floats:
    return rng.standard_normal(shape).astype(np.float32)


def pulled(table: _core.RowTable, ids: Any) -> Floats:
    ids = np.asarray(ids)
    out = np.full((ids.size, table.dim), np.nan, np.float32)
    table.pull(ids, out)
    return out


def push_all(
    variable: _core.DenseVariable, gradient: npt.NDArray[Any], lr: float | None = None
) -> None:
    """Make a step of a whole dense variable."""
    variable.push(0, gradient, lr)


def parts_of(table: _core.RowTable) -> list[tuple[Any, ...]]:
    pieces, part = [], 0
    while part < table.parts:
        *piece, part = table.read_parts(part, 1)
        pieces.append(tuple(piece))
    return pieces


def slots_of(table: _core.RowTable, ids: Any) -> Floats:
    ids = np.asarray(ids)
    pieces = parts_of(table)
    present = np.concatenate([piece[0] for piece in pieces])
    slots = np.concatenate([piece[2] for piece in pieces])
    order = np.argsort(present)
    at = order[np.searchsorted(present, ids, sorter=order)]
    np.testing.assert_array_equal(present[at], ids)
    width = table.slot_floats // max(1, len(table.slots))
    return slots[at].reshape(ids.size, len(table.slots), width)


def present(table: _core.RowTable) -> set[int]:
    """The ids of the rows that the table holds."""
    return {int(row) for ids, _, _ in parts_of(table) for row in ids}


def filled(values: Floats, rule: _core.UpdateRule = SGD, **options: Any) -> _core.RowTable:
    table = _core.RowTable(values.shape[1], rule, rows=values.shape[0], **options)
    table.assign(np.arange(values.shape[0]), values)
    return table
