"""Rows that a worker has pulled lately, so that it need not pull them again."""

from __future__ import annotations

from typing import Any

import numpy as np

from fastdist.ps.client.sharded import ShardedRows
from fastdist.ps.client.spread import owner_of
from fastdist.ps.wire.frames import Array, ids_frame

_NEVER = np.iinfo(np.int64).min // 2


class RowCache:
    """Serves rows of a table from memory while they are young enough.

    What other workers push is seen when a row has become too old; what this one pushes is seen at
    once, if it pushes through the cache or tells it. For the thread of the table's client.

    Each id has one place, by its hash, which it shares with others: no lists, no search.

    Args:
        table: whose rows.
        max_rows: that are kept.
        max_age: calls of `pull` for which a row is served; 0: every pull asks the servers.

    Attributes:
        hits: ids that were served from memory.
        misses: ids that were not.
    """

    def __init__(self, table: ShardedRows, *, max_rows: int, max_age: int) -> None:
        if max_rows < 1 or max_age < 0:
            raise ValueError(
                f"max_rows must be at least 1 and max_age 0, got {max_rows} and {max_age}"
            )
        self.hits = self.misses = 0
        self._table = table
        self._max_age = max_age
        self._pulls = 0
        self._ids = np.zeros(max_rows, np.uint64)
        self._rows = np.empty((max_rows, table.spec.dim), np.float32)
        self._pulled = np.full(max_rows, _NEVER)  # at which pull

    def pull(self, ids: Any) -> Array:
        """As `ShardedRows.pull`; rows are as they were at most `max_age` calls ago."""
        flat, places = self._find(ids)
        self._pulls += 1
        age = self._pulls - self._pulled[places]
        is_here = (self._ids[places] == flat) & (age <= self._max_age)
        found = int(np.count_nonzero(is_here))
        if found == 0:
            rows = self._table.pull(flat)
            self._keep(flat, places, rows)
        elif found == flat.size:
            rows = self._rows[places]
        else:
            rows = np.empty((flat.size, self._table.spec.dim), np.float32)
            missing = np.flatnonzero(~is_here)
            pulled = self._table.pull(flat[missing])
            rows[is_here] = self._rows[places[is_here]]
            rows[missing] = pulled
            self._keep(flat[missing], places[missing], pulled)
        self.hits += found
        self.misses += flat.size - found
        return rows

    def push(self, ids: Any, gradients: Any, lr: float | None = None) -> None:
        """As `ShardedRows.push`."""
        self._table.push(ids, gradients, lr)
        self.forget(ids)

    def assign(self, ids: Any, values: Any) -> None:
        """As `ShardedRows.assign`."""
        self._table.assign(ids, values)
        self.forget(ids)

    def forget(self, ids: Any) -> None:
        """Have rows pulled again; when something else has pushed to them."""
        flat, places = self._find(ids)
        self._pulled[places[self._ids[places] == flat]] = _NEVER

    def _find(self, ids: Any) -> tuple[Array, Array]:
        flat = ids_frame(ids).reshape(-1).view(np.uint64)
        return flat, owner_of(flat, self._ids.size)

    def _keep(self, ids: Array, places: Array, rows: Array) -> None:
        """Of those that share a place the last stays, in each of the arrays."""
        self._ids[places] = ids
        self._rows[places] = rows
        self._pulled[places] = self._pulls
