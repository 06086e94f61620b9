"""A parameter or buffer on servers, as a module on this task sees it."""

from __future__ import annotations

import numpy as np
import torch

from fastdist.ps.client.batched import Pulled, Push
from fastdist.ps.client.requests import Pending
from fastdist.ps.client.sharded import ShardedVariable
from fastdist.ps.wire.frames import Array
from fastdist.training.tensor_stamps import value_stamp

_COUNTABLE = 1 << 24
_MAY_STOP = "num_batches_tracked"  # nothing hangs on how large it is then; jobs should not end


class ServedTensor:
    """A dense value on servers, and the tensor that holds it here.

    Args:
        tensor: a module's parameter or buffer.
        variable: where its value is.
    """

    def __init__(self, tensor: torch.Tensor, variable: ShardedVariable) -> None:
        self.tensor = tensor
        self.sharded = variable
        self._steps: tuple[int, ...] | None = None
        self._is_buffer = not isinstance(tensor, torch.nn.Parameter)
        self.note()

    @property
    def is_in_place(self) -> bool:
        """Whether what comes can be written where the tensor is."""
        tensor = self.tensor
        is_plain = tensor.dtype == torch.float32 and tensor.is_contiguous()
        return is_plain and tensor.device.type == "cpu"

    def room(self) -> Array | None:
        """Where its value can be written to; None: `take` copies it."""
        return self.tensor.detach().numpy() if self.is_in_place else None

    def take(self, pulled: Pulled) -> None:
        """A value has come, to `room` if there was any."""
        self._steps = pulled.steps
        if self.is_in_place:
            torch.autograd.graph.increment_version(self.tensor)
        else:
            value = torch.from_numpy(pulled.value)
            with torch.no_grad():  # means of counts are whole but for float32
                self.tensor.copy_(value if self.tensor.is_floating_point() else value.round())
        self.note()

    def note(self) -> None:
        """What the tensor holds is what the servers have."""
        self._stamp = value_stamp(self.tensor)
        if self._is_buffer:
            self._noted = self._value().copy()

    @property
    def has_changed(self) -> bool:
        """Whether somebody here has written the tensor since.

        Buffers are compared: batch_norm writes its own without a trace.
        """
        if self._is_buffer:
            return not np.array_equal(self._noted, self._value(), equal_nan=True)
        return value_stamp(self.tensor) != self._stamp

    @property
    def can_be_added(self) -> bool:
        """Whether there is a difference of a buffer to what it was; of infinities there is none."""
        return bool(np.isfinite(self._noted).all() and np.isfinite(self._value()).all())

    def begin_assign(self) -> Pending[None]:
        """Send the tensor's value."""
        pending = self.sharded.begin_assign(exact_value(self.sharded.spec.name, self.tensor))
        self.note()
        return pending

    def push_of(self, gradient: Array, lr: float | None = None) -> Push:
        """A gradient, to be sent."""
        return Push(self.sharded, gradient, lr, self._steps)

    def addition(self, factor: float) -> Push:
        """By how much a buffer has changed, times a factor, to be sent; others' changes stay."""
        value = exact_value(self.sharded.spec.name, self.tensor)
        push = self.push_of((self._noted - value) * np.float32(factor))  # its rule subtracts
        self.note()
        return push

    def _value(self) -> Array:
        return np.asarray(self.tensor.detach().float().cpu().numpy())


def exact_value(name: str, tensor: torch.Tensor) -> Array:
    """A value to be sent, as float32.

    Raises:
        ValueError: an integer that float32 might not tell from its neighbours.
    """
    value = tensor.detach()
    is_exact = value.is_floating_point() or abs(int(value)) < _COUNTABLE
    if not is_exact and not name.endswith(_MAY_STOP):
        raise ValueError(
            f"{name} is {int(value)}: parameter servers keep integers as float32, which counts up "
            f"to 2**24 = {_COUNTABLE}; keep larger ones as attributes that are no buffers"
        )
    return np.asarray(value.float().cpu().numpy())
