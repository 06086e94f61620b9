"""Buffers whose values are on servers: workers send their changes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from fastdist.ps.client.client import Client
from fastdist.ps.client.items import Item
from fastdist.ps.model.dense import ServedTensor, assign_all
from fastdist.training.frameworks import inner_modules, moving_averages


class ServedBuffers:
    """The buffers of a model.

    Workers send differences, which the servers add up: a sum over all workers is exact. Running
    statistics are moving averages, which the sum of all workers' differences would move too far;
    each worker sends its fraction of the difference instead.

    Args:
        concurrency: functions that may run at the same time, each with its own steps; 1 if their
            steps are taken together.

    Attributes:
        all: all buffers by name.
        live: names of buffers whose values on the servers may differ from this task's.
    """

    def __init__(self, client: Client, roots: Sequence[nn.Module], concurrency: int) -> None:
        self.all: dict[str, ServedTensor] = {}
        self.live: set[str] = set()
        self._client = client
        self._concurrency = concurrency
        self._averaging = {
            id(buffer): module
            for root in roots
            for module in inner_modules(root)
            for buffer in moving_averages(module)
        }

    def add(self, served: ServedTensor) -> None:
        """Add a buffer, or replace it after a reconnection."""
        name = served.sharded.spec.name
        self.all[name] = served
        # Without concurrency, each function must see the changes of the one before.
        if self._concurrency == 1 or id(served.tensor) in self._averaging:
            self.live.add(name)

    def send_changed(self, size: int) -> None:
        """Send the changes of a function; `size` is the number of functions in its group."""
        self._client.wait_all(self._client.begin_change(self.changes(1 / size)))

    def changes(self, factor: float) -> list[Item]:
        """Return what to send for the changes of a function, times `factor`.

        Values that are not finite are assigned now.
        """
        changed = list(self.changed())
        assigned = [served for served in changed if not served.has_finite_change]
        assign_all(self._client, assigned)
        return [
            item
            for served in changed
            if served not in assigned
            for item in served.difference(self._fraction(served.tensor) * factor)
        ]

    def changed(self) -> Iterator[ServedTensor]:
        """Yield the buffers that were written since the last synchronization."""
        for name, served in self.all.items():
            if served.has_changed:
                self.live.add(name)
                yield served

    def _fraction(self, buffer: torch.Tensor) -> float:
        """Return the fraction of a buffer's difference that this worker sends."""
        module = self._averaging.get(id(buffer))
        if module is None:
            return 1.0
        if module.momentum is None and isinstance(module.num_batches_tracked, torch.Tensor):
            # A cumulative average: each batch counts once, from batch `concurrency` on.
            return min(1.0, max(1, int(module.num_batches_tracked)) / self._concurrency)
        return 1.0 / self._concurrency
