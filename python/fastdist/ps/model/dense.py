"""Parameters and buffers of this task whose values are on servers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import nn

from fastdist.ps.client.client import Client
from fastdist.ps.client.items import Item
from fastdist.ps.client.sharded import Lookup, ShardedVariable, begin_assign
from fastdist.ps.wire.protocol import Array
from fastdist.training.frameworks import inner_modules, moving_averages
from fastdist.training.modules import value_stamp

_COUNTABLE = 1 << 24
_MAY_SATURATE = "num_batches_tracked"  # a count this large has no effect; jobs should not end


class ServedTensor:
    """A dense value on servers, and the parameter or buffer that holds it on this task.

    `is_buffer` is True also for a parameter that its layer uses as a buffer.
    """

    def __init__(self, tensor: torch.Tensor, variable: ShardedVariable, *, is_buffer: bool) -> None:
        self.tensor = tensor
        self.sharded = variable
        self._is_buffer = is_buffer
        self.mark_synced()

    @property
    def is_in_place(self) -> bool:
        """True if a pulled value can be written directly to the tensor's memory.

        A buffer must not get a value before the change that it has from then is forgotten.
        """
        tensor = self.tensor
        is_plain = tensor.dtype == torch.float32 and tensor.is_contiguous()
        return is_plain and tensor.device.type == "cpu" and not self._is_buffer

    def out(self) -> Array | None:
        """Return the destination for a pull; None if `store` copies the value."""
        return self.tensor.detach().numpy() if self.is_in_place else None

    def store(self, pulled: Lookup) -> None:
        """Take a pulled value, which is already in the array that `out` returned, if any."""
        if self.is_in_place:
            torch.autograd.graph.increment_version(self.tensor)
        else:
            value = torch.from_numpy(pulled.value)
            with torch.no_grad():  # round: float32 means of counts may miss the integer slightly
                self.tensor.copy_(value if self.tensor.is_floating_point() else value.round())
        self.mark_synced()

    def mark_synced(self) -> None:
        """Record that the tensor holds the servers' value."""
        self._stamp = value_stamp(self.tensor)
        if self._is_buffer:
            self._synced = to_array(self.tensor).copy()

    @property
    def has_changed(self) -> bool:
        """True if the tensor was written since the last synchronization.

        Buffers are compared by value: batch_norm only bumps num_batches_tracked.
        """
        if self._is_buffer:
            return not np.array_equal(self._synced, to_array(self.tensor), equal_nan=True)
        return value_stamp(self.tensor) != self._stamp

    @property
    def has_finite_change(self) -> bool:
        """True if a buffer's change can be sent as a difference (all values finite)."""
        return bool(np.isfinite(self._synced).all() and np.isfinite(to_array(self.tensor)).all())

    def assignment(self) -> list[Item]:
        """Return what to send for the tensor's value."""
        return self.sharded.assignment(exact_value(self.sharded.spec.name, self.tensor))

    def change(self, lr: float | None, weight: float) -> list[Item]:
        """Return what to send for the tensor's gradient, times `weight`."""
        gradient = self.tensor.grad
        assert gradient is not None
        value = to_array(gradient.to_dense() if gradient.is_sparse else gradient)
        value = value if weight == 1.0 else value * np.float32(weight)
        return self.sharded.change(value, lr)

    def difference(self, factor: float) -> list[Item]:
        """Return what to send for a buffer's change times a factor; other workers' changes stay."""
        value = exact_value(self.sharded.spec.name, self.tensor)
        change = (self._synced - value) * np.float32(factor)  # the rule subtracts
        self.mark_synced()
        return self.sharded.change(change)


class ServedBuffers:
    """The buffers of a model.

    Workers send differences, which the servers add up: a sum over all workers is exact. Running
    statistics are moving averages, which the sum of all workers' differences would move too far;
    each worker sends its fraction of the difference instead.
    """

    def __init__(self, client: Client, roots: Sequence[nn.Module], concurrency: int) -> None:
        self.all: dict[str, ServedTensor] = {}  # by name
        self.live: set[str] = set()  # whose values on the servers may differ from this task's
        self._client = client
        self._concurrency = concurrency  # see `Bundle`
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


def assign_all(client: Client, changed: Sequence[ServedTensor]) -> None:
    """Send the values of tensors."""
    items = [item for served in changed for item in served.assignment()]
    tickets = begin_assign(client, items)
    for served in changed:
        served.mark_synced()
    client.wait_all(tickets)


def to_array(tensor: torch.Tensor) -> Array:
    """Return a tensor's values as float32."""
    return np.asarray(tensor.detach().float().cpu().numpy())


def exact_value(name: str, tensor: torch.Tensor) -> Array:
    """Return a value as float32; raise ValueError for an integer that float32 may not represent."""
    is_exact = tensor.is_floating_point() or abs(int(tensor)) < _COUNTABLE
    if not is_exact and not name.endswith(_MAY_SATURATE):
        raise ValueError(
            f"{name} is {int(tensor)}: parameter servers keep integers as float32, which is exact "
            f"up to 2**24 = {_COUNTABLE}; keep larger integers as plain attributes, not buffers"
        )
    return to_array(tensor)
