"""Stamps of values, to detect later changes."""

from __future__ import annotations

import torch

from fastdist.training.modules import is_materialized


def value_stamp(tensor: torch.Tensor) -> object:
    """Return a stamp that changes with the tensor's values and with `requires_grad`."""
    address = tensor.data_ptr() if is_materialized(tensor) else None
    return tensor._version, address, tensor.requires_grad
