"""Parameters and buffers of this task whose values are on servers."""

from __future__ import annotations

import numpy as np
import torch

from fastdist.ps.client.items import Item
from fastdist.ps.client.requests import Pending
from fastdist.ps.client.sharded import Pulled, ShardedVariable
from fastdist.ps.wire.frames import Array
from fastdist.training.tensor_stamps import value_stamp

_COUNTABLE = 1 << 24
_MAY_SATURATE = "num_batches_tracked"  # a count this large has no effect; jobs should not end


class ServedTensor:
    """A dense value on servers, and the tensor that holds it on this task.

    Args:
        tensor: a module's parameter or buffer.
        variable: its value on the servers.
        is_buffer: True for a buffer, and for a parameter that its layer uses as one.
    """

    def __init__(self, tensor: torch.Tensor, variable: ShardedVariable, *, is_buffer: bool) -> None:
        self.tensor = tensor
        self.sharded = variable
        self._steps: tuple[int, ...] | None = None
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

    def store(self, pulled: Pulled) -> None:
        """Take a pulled value, which is already in the array that `out` returned, if any."""
        self._steps = pulled.steps
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
            self._synced = self._value().copy()

    @property
    def has_changed(self) -> bool:
        """True if the tensor was written since the last synchronization.

        Buffers are compared by value: batch_norm only bumps num_batches_tracked.
        """
        if self._is_buffer:
            return not np.array_equal(self._synced, self._value(), equal_nan=True)
        return value_stamp(self.tensor) != self._stamp

    @property
    def has_finite_change(self) -> bool:
        """True if a buffer's change can be sent as a difference (all values finite)."""
        return bool(np.isfinite(self._synced).all() and np.isfinite(self._value()).all())

    def begin_assign(self) -> Pending[None]:
        """Send the tensor's value, without waiting."""
        pending = self.sharded.begin_assign(exact_value(self.sharded.spec.name, self.tensor))
        self.mark_synced()
        return pending

    def change(self, gradient: Array, lr: float | None = None) -> list[Item]:
        """Return what to send for a gradient."""
        return self.sharded.change(gradient, lr, self._steps)

    def difference(self, factor: float) -> list[Item]:
        """Return what to send for a buffer's change times a factor; other workers' changes stay."""
        value = exact_value(self.sharded.spec.name, self.tensor)
        change = self.change((self._synced - value) * np.float32(factor))  # the rule subtracts
        self.mark_synced()
        return change

    def _value(self) -> Array:
        return np.asarray(self.tensor.detach().float().cpu().numpy())


def exact_value(name: str, tensor: torch.Tensor) -> Array:
    """Return a value as float32, for sending.

    Raises:
        ValueError: an integer that float32 may not represent exactly.
    """
    value = tensor.detach()
    is_exact = value.is_floating_point() or abs(int(value)) < _COUNTABLE
    if not is_exact and not name.endswith(_MAY_SATURATE):
        raise ValueError(
            f"{name} is {int(value)}: parameter servers keep integers as float32, which is exact "
            f"up to 2**24 = {_COUNTABLE}; keep larger integers as plain attributes, not buffers"
        )
    return np.asarray(value.float().cpu().numpy())
