"""Variables and tables on several servers, with calls that wait for the servers."""

from __future__ import annotations

from typing import Any

import numpy as np
from fastdist.ps.client import sharded
from fastdist.ps.client.sharded import begin_assign, pull_together


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
