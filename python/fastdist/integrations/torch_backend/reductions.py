"""Maps torch's reductions to those of the engines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed import ReduceOp

from fastdist.collectives.communicator import Communicator
from fastdist.integrations.torch_backend.tensors import Finish, check_reducible

_ALL: tuple[tuple[Any, str, Callable[..., torch.Tensor]], ...] = (
    (ReduceOp.SUM, "sum", torch.add),
    (ReduceOp.AVG, "mean", torch.add),
    (ReduceOp.PRODUCT, "prod", torch.mul),
    (ReduceOp.MIN, "min", torch.minimum),
    (ReduceOp.MAX, "max", torch.maximum),
    (ReduceOp.BAND, "and", torch.bitwise_and),
    (ReduceOp.BOR, "or", torch.bitwise_or),
    (ReduceOp.BXOR, "xor", torch.bitwise_xor),
)
# By hash: comparing two reductions takes as long as a small collective.
_NAMES = {hash(ReduceOp(kind)): name for kind, name, _ in _ALL}
_COMBINE = {name: combine for _, name, combine in _ALL}


def combined(tensors: Sequence[torch.Tensor], op: str) -> torch.Tensor:
    """Reduce tensors of this rank into a new one; for a mean, return the sum."""
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        _COMBINE[op](total, tensor, out=total)
    return total


def reduction_of(
    opts: Any,
    given: Sequence[torch.Tensor],
    written: Sequence[torch.Tensor],
    finish: Finish,
    size: int,
) -> tuple[Any, Any, Finish]:
    """Map one of torch's reductions to the engines', for results of one dtype.

    Returns:
        The engines' name, the factor of the inputs (or None), and a function to call afterwards;
        for a mean of integers it divides the sum, as NCCL does.
    """
    op = opts.reduceOp
    name, factor = _NAMES.get(hash(op)), None
    if name is None:
        name, factor = "sum", op.__getstate__()[1]
    is_divided = name == "mean" and not (written[0].is_floating_point() or written[0].is_complex())
    for tensor in given:
        check_reducible(tensor, "sum" if is_divided else name)
    if not is_divided:
        return name, factor, finish

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
        return torch.mul(tensor, factor)


def all_reduce_sparse(comm: Communicator, tensor: torch.Tensor, op: Any, timeout_s: float) -> None:
    """Add up a sparse COO tensor over all ranks, in place."""
    if tensor.layout is not torch.sparse_coo or op != ReduceOp.SUM:
        raise ValueError(
            f"sparse tensors can only be summed, in the COO layout; got {tensor.layout} and {op}"
        )
    own = tensor.detach().coalesce()
    splits = comm.all_gather(torch.tensor([own._nnz()]), timeout=timeout_s).tolist()
    # One row per element: indices and values are gathered along axis 0.
    indices = comm.all_gather(own.indices().T.contiguous(), splits=splits, timeout=timeout_s)
    values = comm.all_gather(own.values().contiguous(), splits=splits, timeout=timeout_s)
    total = torch.sparse_coo_tensor(indices.T, values, tensor.shape, check_invariants=False)
    with torch.no_grad():
        tensor.copy_(total.coalesce())
