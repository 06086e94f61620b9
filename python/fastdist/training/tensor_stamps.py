"""Stamps of values and gradients, to detect later changes."""

from __future__ import annotations

import weakref

import torch

from fastdist.training.modules import is_materialized


def value_stamp(tensor: torch.Tensor) -> object:
    """Return a stamp that changes with the tensor's values and with `requires_grad`."""
    address = tensor.data_ptr() if is_materialized(tensor) else None
    return tensor._version, address, tensor.requires_grad


class GradientStamp:
    """A stamp of a tensor's gradient, which it refers to weakly."""

    __slots__ = ("_grad", "_version")

    def __init__(self, tensor: torch.Tensor) -> None:
        grad = tensor.grad
        self._grad = None if grad is None else weakref.ref(grad)
        self._version = 0 if grad is None else grad._version

    def is_stale(self, tensor: torch.Tensor) -> bool:
        """Return True if the gradient was replaced or its values have changed since."""
        grad = tensor.grad
        if grad is None or self._grad is None:
            return grad is not None or self._grad is not None
        return self._grad() is not grad or self._version != grad._version
