"""Tables of rows on servers, as embeddings of this task use them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

import fastdist._core as _core
from fastdist.errors import FastdistError
from fastdist.ps.wire.protocol import Array, to_ids

if TYPE_CHECKING:  # `fastdist.nn` loads no sockets
    from fastdist.ps.client.items import Item
    from fastdist.ps.client.sharded import Lookup, ShardedRows

_CHUNK_ROWS = 65536
# A batch that comes later than announced is read again and again, but not for ever.
_MOST_READS = 8
_NEVER = np.iinfo(np.int64).min // 2


@dataclass(slots=True, eq=False)
class Wanted:
    """The ids of a lookup."""

    unique: torch.Tensor  # sorted
    positions: torch.Tensor  # for each given id, the position of its row
    pulled: Lookup | None = None  # their rows, if they have been read; without padding


@dataclass(slots=True, eq=False)
class Prefetch:
    """The rows of a later batch."""

    given: torch.Tensor  # a copy of its ids
    wanted: Wanted  # with rows, unless they must be read again after a push
    lookup: Lookup
    reads: int = 0  # how often the rows have been read

    def store(self, pulled: Lookup) -> None:
        """Take what was read."""
        self.wanted.pulled = pulled


class ServedTable:
    """A table of rows on servers. Without a cache, it pulls all rows every time."""

    def __init__(
        self,
        weight: nn.Parameter,
        rows: ShardedRows,
        cache: RowCache | None = None,
        padding: int | None = None,
    ) -> None:
        self.weight = weight  # the parameter that stands for the rows
        self.sharded = rows
        self.name = repr(rows.spec.name.partition("/")[2])  # for errors
        self.prefetched: list[Prefetch] = []  # rows of later batches
        self._cache = cache
        self._padding = padding  # an id whose row is zero, whatever the servers have
        self._lock = rows.client.lock  # autograd may call from threads of its own
        self._is_hashed = rows.spec.rows is None
        # For a table without a limit: the ids of gradients' rows, from index `_first_index` on.
        self._ids: list[Array] = []
        self._first_index = self._next_index = 0
        self._pushed: list[Array] = []

    def __deepcopy__(self, memo: dict[int, object]) -> ServedTable:
        """Return the same table: copies of a module share their rows."""
        return self

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """Pickle as None: an unpickled module is connected again, if at all, where it arrives."""
        return type(None), ()

    def find(self, ids: torch.Tensor) -> Wanted:
        """Return what to look up for ids; ends a prefetch of the same ids."""
        for known in self.prefetched:
            given, wanted = known.given, known.wanted
            is_alike = given.dtype == ids.dtype and wanted.pulled is not None
            if is_alike and torch.equal(given, ids.to(given.device)):
                self.prefetched.remove(known)
                unique, positions = wanted.unique.to(ids.device), wanted.positions.to(ids.device)
                return Wanted(unique, positions, wanted.pulled)
        return Wanted(*torch.unique(ids, return_inverse=True))

    @staticmethod
    def pull(tables: Sequence[ServedTable], wanted: Sequence[Wanted]) -> list[torch.Tensor]:
        """Return rows [ids, dim] of one scope's tables, each on the device of its ids."""
        ids = [one.unique.cpu().numpy() for one in wanted]
        rows: dict[int, Array] = {}
        with tables[0]._lock:
            for i, (table, one) in enumerate(zip(tables, wanted, strict=True)):
                if table._cache is not None:
                    rows[i] = table._cache.pull(ids[i])
                elif one.pulled is not None:
                    rows[i] = one.pulled.value
            lookups = {i: t.sharded.lookup(ids[i]) for i, t in enumerate(tables) if i not in rows}
            if lookups:
                from fastdist.ps.client.sharded import pull_together

                pull_together(tables[0].sharded.client, list(lookups.values()))
                rows |= {i: lookup.value for i, lookup in lookups.items()}
        for i, table in enumerate(tables):
            if table._padding is not None:
                rows[i][ids[i] == table._padding] = 0
        return [torch.from_numpy(rows[i]).to(one.unique.device) for i, one in enumerate(wanted)]

    def prefetch(self, ids: torch.Tensor) -> None:
        """Announce ids; a table with a cache reads them when they are needed."""
        if self._cache is None:
            wanted = Wanted(*torch.unique(ids, return_inverse=True))
            lookup = self.sharded.lookup(wanted.unique.cpu().numpy())
            self.prefetched.append(Prefetch(ids.clone(), wanted, lookup))

    def begin_reads(self) -> list[Prefetch]:
        """Return the prefetches that the next pull must read."""
        self.prefetched = [known for known in self.prefetched if known.reads < _MOST_READS]
        for known in self.prefetched:
            known.reads += 1
            known.wanted.pulled = None
        return self.prefetched.copy()

    def gradient_indices(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the indices of these ids' rows in the weight's gradient.

        Without a limit, ids may exceed any tensor's size: their rows are numbered instead.
        """
        if not self._is_hashed:
            return ids
        with self._lock:
            begin, self._next_index = self._next_index, self._next_index + ids.numel()
            self._ids.append(ids.cpu().numpy())
        return torch.arange(begin, self._next_index, device=ids.device)

    def change(self, lr: float | None, weight: float) -> list[Item]:
        """Return what to send for the weight's gradient, times `weight`."""
        gradient = self.weight.grad
        assert gradient is not None
        if not gradient.is_sparse:  # the user assigned it
            gradient = gradient.to_sparse(1)
        indices = gradient._indices()[0].cpu().numpy()  # may repeat
        values = gradient._values().detach().float().cpu().numpy()
        ids = self._ids_at(indices) if self._is_hashed else indices
        values = values if weight == 1.0 else values * np.float32(weight)
        self._pushed.append(ids)
        return self.sharded.change(ids, values, lr)

    def coalesce(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return the weight's gradient with each row once."""
        if not self._is_hashed:
            return gradient.coalesce()
        indices = gradient._indices()[0]
        with self._lock:
            ids = self._ids_at(indices.cpu().numpy())
        _, firsts, which = np.unique(ids, return_index=True, return_inverse=True)
        places = indices[torch.from_numpy(firsts[which]).to(indices.device)]
        values, shape = gradient._values(), gradient.shape
        alike = torch.sparse_coo_tensor(
            places.reshape(1, -1), values, shape, check_invariants=False
        )
        return alike.coalesce()

    def _ids_at(self, places: Array) -> Array:
        if not places.size:
            return places
        if not self._first_index <= places.min() <= places.max() < self._next_index:
            raise FastdistError(
                f"the gradient of {self.name} has rows of a backward pass whose gradients an "
                "earlier step or function has already used: keep gradients of a table without a "
                "limit of rows only in the parameter"
            )
        ids: Array = np.concatenate(self._ids)[places - self._first_index]
        return ids

    def forget(self) -> None:
        """Finish with the gradient, applied or not: cached rows of its pushes are stale."""
        if self._cache is not None:
            for ids in self._pushed:
                self._cache.forget(ids)
        self._pushed.clear()
        if self._is_hashed:  # drop ids, but for a gradient that stays after it was applied
            gradient = self.weight.grad
            kept = self._next_index
            if gradient is not None and gradient._nnz():
                kept = int(gradient._indices().min())
            while self._ids and self._first_index + self._ids[0].size <= kept:
                self._first_index += self._ids.pop(0).size

    def assign(self, values: torch.Tensor) -> None:
        """Set all rows of a table with a limit."""
        for begin in range(0, values.shape[0], _CHUNK_ROWS):
            part = values[begin : begin + _CHUNK_ROWS].detach().float().cpu().numpy()
            self.sharded.assign(np.arange(begin, begin + len(part)), part)

    def all_rows(self) -> torch.Tensor | None:
        """Return all rows of a table with a limit; None without a limit."""
        spec = self.sharded.spec
        if spec.rows is None:
            return None
        out = torch.empty((spec.rows, spec.dim), dtype=self.weight.dtype)
        for begin in range(0, spec.rows, _CHUNK_ROWS):
            ids = np.arange(begin, min(begin + _CHUNK_ROWS, spec.rows))
            out[begin : begin + ids.size] = torch.from_numpy(self.sharded.pull(ids))
        return out


class RowCache:
    """Serves rows of a table from memory, each for `max_age` calls of `pull`; 0 pulls every time.

    Pushes of other workers are seen when a row expires; call `forget` after pushes of this worker.
    Each id has one slot, by its hash, which it shares with other ids: there is no search.
    """

    def __init__(self, table: ShardedRows, *, max_rows: int, max_age: int) -> None:
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
        missing = np.flatnonzero(~is_here)
        if not missing.size:
            return self._rows[slots]
        rows = pulled = self._table.pull(flat[missing])
        if missing.size < flat.size:
            rows = self._rows[slots]
            rows[missing] = pulled
        # Of ids that share a slot, the last wins, in all three arrays.
        slots = slots[missing]
        self._ids[slots] = flat[missing]
        self._rows[slots] = pulled
        self._pulled[slots] = self._pulls
        return rows

    def forget(self, ids: Any) -> None:
        """Drop rows, after a push to them."""
        flat, slots = self._slots_of(ids)
        self._pulled[slots[self._ids[slots] == flat]] = _NEVER

    def _slots_of(self, ids: Any) -> tuple[Array, Array]:
        flat = to_ids(ids).reshape(-1).view(np.uint64)
        return flat, self._hash.owners_of(flat)
