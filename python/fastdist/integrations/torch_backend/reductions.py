"""Torch's reductions as the engines name them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed import ReduceOp

_NAMES = {
    ReduceOp(ReduceOp.SUM): "sum",
    ReduceOp(ReduceOp.AVG): "mean",
    ReduceOp(ReduceOp.PRODUCT): "prod",
    ReduceOp(ReduceOp.MIN): "min",
    ReduceOp(ReduceOp.MAX): "max",
    ReduceOp(ReduceOp.BAND): "and",
    ReduceOp(ReduceOp.BOR): "or",
    ReduceOp(ReduceOp.BXOR): "xor",
}


def reduction_of(op: Any) -> tuple[Any, Any]:
    """Return a reduction's name, and the factor to multiply the tensors by before, or None."""
    name = _NAMES.get(op)
    return (name, None) if name is not None else ("sum", op.__getstate__()[1])


def scale_in_place(tensors: Sequence[torch.Tensor], factor: Any) -> None:
    """Multiply tensors by a factor, if there is one."""
    if factor is not None:
        with torch.no_grad():
            torch._foreach_mul_(list(tensors), factor)


def scaled(tensor: torch.Tensor, factor: Any) -> torch.Tensor:
    """Return the tensor times a factor, if there is one."""
    if factor is None:
        return tensor
    with torch.no_grad():
        made: torch.Tensor = tensor * factor
        return made
