"""Buffers whose values are on servers: what each worker has changed goes there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from fastdist.ps.client.batched import begin_pushes
from fastdist.ps.client.client import Client
from fastdist.ps.model.dense import ServedTensor
from fastdist.training.module_structure import modules_of


def functions_at_once(workers: int, max_staleness: int | None, *, synchronous: bool) -> int:
    """How many functions of a job may change buffers without knowing of each other."""
    if synchronous:
        return 1
    return workers if max_staleness is None else min(workers, max_staleness + 1)


class ServedBuffers:
    """The buffers of a model.

    Differences are sent, which the servers add up, so that a sum over all workers is one. Running
    statistics are moving averages: workers that do not know of each other would move them too far,
    beyond any bound, so that each has its share of the way.

    Args:
        client: of this task.
        roots: the modules.
        at_once: functions that may run at the same time, and step for themselves.

    Attributes:
        all: by name.
        live: names of those that may be others on the servers than here.
    """

    def __init__(self, client: Client, roots: Sequence[nn.Module], at_once: int) -> None:
        self.all: dict[str, ServedTensor] = {}
        self.live: set[str] = set()
        self._client = client
        self._at_once = at_once
        self._averaging = {
            id(buffer): module
            for module in modules_of(roots)
            if isinstance(module, nn.modules.batchnorm._NormBase) and module.track_running_stats
            for buffer in (module.running_mean, module.running_var)
        }

    def add(self, served: ServedTensor) -> None:
        """There is one more, or it is on other servers now."""
        name = served.sharded.spec.name
        self.all[name] = served
        # Where one function knows what the one before did, it does from the first on.
        if self._at_once == 1 or id(served.tensor) in self._averaging:
            self.live.add(name)

    def live_ones(self) -> list[ServedTensor]:
        """Those whose values are to be asked for."""
        return [served for name, served in self.all.items() if name in self.live]

    def take_all(self) -> None:
        """Those on the servers may be others than here."""
        self.live |= self.all.keys()

    def assign_changed(self) -> None:
        """Send what was changed here, by hand."""
        changed = list(self._changed())
        for pending in [served.begin_assign() for served in changed]:
            pending.result()

    def send_changed(self, size: int) -> None:
        """Send what a function has changed, of which a group has so many."""
        self._push([(one, self._share(one.tensor) / size) for one in self._changed()], 0)

    def stage_changed(self, round: int, weight: float) -> None:
        """Send what a function has changed, times `weight`, to wait for the round's commit."""
        self._push([(one, weight) for one in self._changed()], round)

    def _push(self, changed: Sequence[tuple[ServedTensor, float]], round: int) -> None:
        assigned = [served for served, _ in changed if not served.can_be_added]
        for pending in [served.begin_assign() for served in assigned]:
            pending.result()
        added = [served.addition(factor) for served, factor in changed if served not in assigned]
        begin_pushes(self._client, added, round).result()

    def _changed(self) -> Iterator[ServedTensor]:
        for name, served in self.all.items():
            if served.has_changed:
                self.live.add(name)
                yield served

    def _share(self, buffer: torch.Tensor) -> float:
        """Of the way that a buffer has gone here, how much it goes on the servers."""
        module = self._averaging.get(id(buffer))
        if module is None:
            return 1.0
        if module.momentum is None and module.num_batches_tracked is not None:
            # Of N batches this is one, as it should be, from the N-th on.
            return min(1.0, max(1, int(module.num_batches_tracked)) / self._at_once)
        return 1.0 / self._at_once
