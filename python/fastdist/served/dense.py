"""A parameter or buffer on servers, as a module on this task sees it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from fastdist.ps.frames import Array
from fastdist.ps.pending import Pending
from fastdist.ps.sharded import ShardedVariable
from fastdist.tensor_stamps import value_stamp


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
        self._pulling: Pending[Array] | None = None
        self._is_buffer = not isinstance(tensor, torch.nn.Parameter)
        self.note()

    @property
    def is_in_place(self) -> bool:
        """Whether what comes can be written where the tensor is."""
        tensor = self.tensor
        is_plain = tensor.dtype == torch.float32 and tensor.is_contiguous()
        return is_plain and tensor.device.type == "cpu"

    def begin_pull(self) -> None:
        """Ask for the value."""
        out = self.tensor.detach().numpy() if self.is_in_place else None
        self._pulling = self.sharded.begin_pull(out)

    def end_pull(self) -> None:
        """Take the value that was asked for."""
        assert self._pulling is not None
        value = self._pulling.result()
        self._steps = self._pulling.steps
        self._pulling = None
        if self.is_in_place:
            torch.autograd.graph.increment_version(self.tensor)
        else:
            with torch.no_grad():
                self.tensor.copy_(torch.from_numpy(value))
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
            return not np.array_equal(self._noted, self._value())
        return value_stamp(self.tensor) != self._stamp

    def begin_assign(self) -> Pending[None]:
        """Send the tensor's value."""
        pending = self.sharded.begin_assign(self._value())
        self.note()
        return pending

    def begin_push(self, gradient: Any, lr: float | None = None, round: int = 0) -> Pending[None]:
        """Send a gradient, as an array."""
        return self.sharded.begin_push(gradient, lr, round=round, step=self._steps)

    def begin_add(self) -> Pending[None]:
        """Send by how much a buffer has changed; what others have added stays."""
        pending = self.begin_push(self._noted - self._value())  # its rule subtracts
        self.note()
        return pending

    def _value(self) -> Array:
        return np.asarray(self.tensor.detach().float().cpu().numpy())
