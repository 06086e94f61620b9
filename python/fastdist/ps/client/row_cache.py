"""A worker's cache of rows that it has pulled recently."""

from __future__ import annotations

from typing import Any

import numpy as np

import fastdist._core as _core
from fastdist.ps.client.sharded import ShardedRows
from fastdist.ps.wire.frames import Array, to_ids

_NEVER = np.iinfo(np.int64).min // 2


class RowCache:
    """Serves rows of a table from memory while they are recent enough.

    Pushes of other workers are seen when a row expires; call `forget` after pushes of this worker.
    For the thread of the table's client.

    Each id has one slot, by its hash, which it shares with other ids: there is no search. A row is
    served for `max_age` calls of `pull`; 0 pulls every time.
    """

    def __init__(self, table: ShardedRows, *, max_rows: int, max_age: int) -> None:
        if max_rows < 1 or max_age < 0:
            raise ValueError(
                f"max_rows must be at least 1 and max_age 0, got {max_rows} and {max_age}"
            )
        self.hits = self.misses = 0  # ids that were served from memory, and others
        self._table = table
        self._max_age = max_age
        self._pulls = 0
        self._hash = _core.Owners(max_rows)
        self._ids = np.zeros(max_rows, np.uint64)
        self._rows = np.empty((max_rows, table.spec.dim), np.float32)
        self._pulled = np.full(max_rows, _NEVER)  # at which pull

    def pull(self, ids: Any) -> Array:
        """Return rows as `ShardedRows.pull`; a row may be up to `max_age` calls old."""
        flat, slots = self._slots_of(ids)
        self._pulls += 1
        age = self._pulls - self._pulled[slots]
        is_here = (self._ids[slots] == flat) & (age <= self._max_age)
        found = int(np.count_nonzero(is_here))
        if found == 0:
            rows = self._table.pull(flat)
            self._keep(flat, slots, rows)
        elif found == flat.size:
            rows = self._rows[slots]
        else:
            rows = np.empty((flat.size, self._table.spec.dim), np.float32)
            missing = np.flatnonzero(~is_here)
            pulled = self._table.pull(flat[missing])
            rows[is_here] = self._rows[slots[is_here]]
            rows[missing] = pulled
            self._keep(flat[missing], slots[missing], pulled)
        self.hits += found
        self.misses += flat.size - found
        return rows

    def forget(self, ids: Any) -> None:
        """Drop rows, after a push to them."""
        flat, slots = self._slots_of(ids)
        self._pulled[slots[self._ids[slots] == flat]] = _NEVER

    def _slots_of(self, ids: Any) -> tuple[Array, Array]:
        flat = to_ids(ids).reshape(-1).view(np.uint64)
        return flat, self._hash.owners_of(flat)

    def _keep(self, ids: Array, slots: Array, rows: Array) -> None:
        """Store rows. Of ids that share a slot, the last wins, in all three arrays."""
        self._ids[slots] = ids
        self._rows[slots] = rows
        self._pulled[slots] = self._pulls
