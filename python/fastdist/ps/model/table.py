"""A table of rows on servers, as an embedding on this task sees it."""

from __future__ import annotations

import threading

import numpy as np
import torch
from torch import nn

from fastdist.errors import FastdistError
from fastdist.ps.client.requests import Pending
from fastdist.ps.client.row_cache import RowCache
from fastdist.ps.client.sharded import ShardedRows
from fastdist.ps.model.rows import gradient_of
from fastdist.ps.model.table_weight import TableWeight, table_weight
from fastdist.ps.wire.frames import Array

_CHUNK_ROWS = 65536


class ServedTable:
    """Rows on servers.

    Args:
        weight: the parameter that stands for them.
        rows: where they are.
        lock: of the client; replicas of one process share it, and this.
        cache: of rows; None: all are pulled each time.
        padding: an id whose row is zero, whatever the servers have.
    """

    def __init__(
        self,
        weight: nn.Parameter,
        rows: ShardedRows,
        lock: threading.RLock,
        cache: RowCache | None = None,
        padding: int | None = None,
    ) -> None:
        self.weight = weight
        self.sharded = rows
        self.name = repr(rows.spec.name.partition("/")[2])
        self._cache = cache
        self._padding = padding
        self._lock = lock
        self._is_hashed = rows.spec.rows is None
        # Of a table without a limit: the ids of the rows of gradients, from the place `_first` on.
        self._ids: list[Array] = []
        self._first = self._count = 0
        self._pushed: list[Array] = []
        self._steps: tuple[int, ...] = ()  # of the values that were pulled, the oldest

    def __deepcopy__(self, memo: dict[int, object]) -> ServedTable:
        """Copies of a module have their rows in the same place."""
        return self

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """Pickled modules find it where they arrive, if they do."""
        return type(None), ()

    def pull(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows [ids, dim] on the device of the ids."""
        own = ids.cpu().numpy()
        with self._lock:
            rows = self._pull(own)
        if self._padding is not None:
            rows[own == self._padding] = 0
        return torch.from_numpy(rows).to(ids.device)

    def _pull(self, ids: Array) -> Array:
        if self._cache is not None:
            return self._cache.pull(ids)
        pending = self.sharded.begin_pull(ids)
        rows = pending.result()
        self._steps = tuple(map(min, self._steps or pending.steps, pending.steps))
        return rows

    def indices(self, ids: torch.Tensor) -> torch.Tensor:
        """Where in the gradient of the weight the rows of these ids are.

        Ids of 64 bits are beyond any tensor: their rows are counted.
        """
        if not self._is_hashed:
            return ids
        with self._lock:
            begin, self._count = self._count, self._count + ids.numel()
            self._ids.append(ids.cpu().numpy())
        return torch.arange(begin, self._count, device=ids.device)

    def begin_push(self, lr: float | None, round: int, weight: float) -> Pending[None]:
        """Send the weight's gradient, times `weight`."""
        indices, values = gradient_of(self.weight)
        ids = self._ids_at(indices) if self._is_hashed else indices
        values = values if weight == 1.0 else values * np.float32(weight)
        self._pushed.append(ids)
        return self.sharded.begin_push(ids, values, lr, round=round, step=self._steps or None)

    def summed(self, gradient: torch.Tensor) -> torch.Tensor:
        """The weight's gradient, with each row once."""
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
        if not self._first <= places.min() <= places.max() < self._count:
            raise FastdistError(
                f"the gradient of {self.name} has rows of a backward that an earlier step or "
                "function has done with: gradients of a table without a limit of rows are not to "
                "be kept elsewhere than in the parameter"
            )
        ids: Array = np.concatenate(self._ids)[places - self._first]
        return ids

    def forget(self) -> None:
        """The gradient has been applied, or given up: pull its rows again."""
        if self._cache is not None:
            for ids in self._pushed:
                self._cache.forget(ids)
        self._pushed.clear()
        self._steps = ()
        if self._is_hashed:
            self._drop_ids()

    def _drop_ids(self) -> None:
        """Those that no gradient refers to; it may stay when it has been applied."""
        gradient = self.weight.grad
        kept = self._count
        if gradient is not None and gradient._nnz():
            kept = int(gradient._indices().min())
        while self._ids and self._first + self._ids[0].size <= kept:
            self._first += self._ids.pop(0).size

    def take_weight(self) -> None:
        """Give the servers what the weight holds, and keep nothing here."""
        weight = self.weight
        if not isinstance(weight, TableWeight):
            self.assign(weight)
            rows, dim = weight.shape
            weight.data = table_weight(rows, dim, weight.dtype, weight.device).data
            weight.__class__ = TableWeight

    def assign(self, values: torch.Tensor) -> None:
        """Set all rows of a table with a limit."""
        for begin in range(0, values.shape[0], _CHUNK_ROWS):
            part = values[begin : begin + _CHUNK_ROWS].detach().float().cpu().numpy()
            self.sharded.assign(np.arange(begin, begin + len(part)), part)

    def value(self) -> torch.Tensor | None:
        """All rows of a table with a limit."""
        spec = self.sharded.spec
        if spec.rows is None:
            return None
        out = torch.empty((spec.rows, spec.dim), dtype=self.weight.dtype)
        for begin in range(0, spec.rows, _CHUNK_ROWS):
            ids = np.arange(begin, min(begin + _CHUNK_ROWS, spec.rows))
            out[begin : begin + ids.size] = torch.from_numpy(self.sharded.pull(ids))
        return out
