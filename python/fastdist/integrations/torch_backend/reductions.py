"""Torch's reductions as the engines name them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed import ReduceOp

# By their hashes, which differ: to compare reductions takes as long as a small collective.
_NAMES = {
    hash(ReduceOp(kind)): name
    for kind, name in (
        (ReduceOp.SUM, "sum"),
        (ReduceOp.AVG, "mean"),
        (ReduceOp.PRODUCT, "prod"),
        (ReduceOp.MIN, "min"),
        (ReduceOp.MAX, "max"),
        (ReduceOp.BAND, "and"),
        (ReduceOp.BOR, "or"),
        (ReduceOp.BXOR, "xor"),
    )
}


def reduction_of(op: Any) -> tuple[Any, Any]:
    """Return a reduction's name, and the factor to multiply the tensors by before, or None."""
    name = _NAMES.get(hash(op))
    return ("sum", op.__getstate__()[1]) if name is None else (name, None)


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
