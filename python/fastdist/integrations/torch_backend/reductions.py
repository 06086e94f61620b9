"""Maps torch's reductions to those of the engines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed import ReduceOp

from fastdist.integrations.torch_backend.tensors import Finish

# By hash: comparing two reductions takes as long as a small collective.
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

_COMBINE: dict[str, Callable[..., torch.Tensor]] = {
    "sum": torch.add,
    "mean": torch.add,
    "prod": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
    "and": torch.bitwise_and,
    "or": torch.bitwise_or,
    "xor": torch.bitwise_xor,
}


def combined(tensors: Sequence[torch.Tensor], op: str) -> torch.Tensor:
    """Reduce tensors of this rank into a new one; a mean is only summed, not divided."""
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        _COMBINE[op](total, tensor, out=total)
    return total


def reduction_of(
    op: Any, written: Sequence[torch.Tensor], finish: Finish, size: int
) -> tuple[Any, Any, Finish]:
    """Map one of torch's reductions to the engines', which will write tensors of one dtype.

    Returns:
        The engines' name, the factor of the inputs (or None), and a function to call afterwards,
        which divides the sum for a mean of integers, as NCCL does.
    """
    name = _NAMES.get(hash(op))
    if name is None:
        return "sum", op.__getstate__()[1], finish
    if name != "mean" or written[0].is_floating_point() or written[0].is_complex():
        return name, None, finish

    def divide() -> None:
        for tensor in written:
            tensor.div_(size, rounding_mode="trunc")
        if finish is not None:
            finish()

    return "sum", None, divide


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
