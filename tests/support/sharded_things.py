"""Variables and tables on servers, with calls that wait for the servers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from fastdist.ps import Client, Item
from fastdist.ps.client import sharded
from fastdist.ps.client.sharded import begin_assign, pull_together
from fastdist.ps.wire.protocol import to_ids


class ShardedVariable(sharded.ShardedVariable):
    def pull(self, out: np.ndarray | None = None) -> np.ndarray:
        """Return the value: float32, of the whole shape."""
        (pulled,) = pull_together(self._client, [self.lookup(out)])
        return pulled.value

    def push(self, gradient: Any, lr: float | None = None) -> None:
        """Apply a gradient of the whole shape."""
        self._client.wait_all(self._client.begin_change(self.change(gradient, lr)))

    def assign(self, value: Any) -> None:
        """Set the value, of the whole shape."""
        self._client.wait_all(begin_assign(self._client, self.assignment(value)))


class ShardedRows(sharded.ShardedRows):
    def push(self, ids: Any, gradients: Any, lr: float | None = None) -> None:
        """Apply gradients, [ids, dim]; gradients of equal ids are added up."""
        self.client.wait_all(self.client.begin_change(self.change(ids, gradients, lr)))


# --- one server's ---------------------------------------------------------------------------------


def pull(client: Client, server: int, number: int, shape: Sequence[int]) -> np.ndarray:
    """Return a dense variable's value: float32."""
    out = np.empty(shape, np.float32)
    client.wait_all(client.begin_read(Item(server, number, out).cut()))
    return out


def push(client: Client, server: int, number: int, gradient: Any, lr: float | None = None) -> None:
    """Apply a gradient to a dense variable."""
    item = Item(server, number, np.ascontiguousarray(gradient, np.float32), lr=lr)
    client.wait_all(client.begin_change(item.cut()))


def pull_rows(client: Client, server: int, number: int, ids: Any, dim: int) -> np.ndarray:
    """Return rows of a table: float32 [ids, dim]."""
    own = to_ids(ids)
    out = np.empty((own.size, dim), np.float32)
    client.wait_all(client.begin_read(Item(server, number, out, own).cut()))
    return out


def push_rows(client: Client, server: int, number: int, ids: Any, gradients: Any) -> None:
    """Apply gradients, [ids, dim], to rows; gradients of equal ids are added up."""
    item = Item(server, number, np.ascontiguousarray(gradients, np.float32), to_ids(ids))
    client.wait_all(client.begin_change([item]))
