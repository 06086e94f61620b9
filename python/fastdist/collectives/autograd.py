"""Differentiable collectives, which return new tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fastdist.collectives.communicator import Communicator
from fastdist.collectives.types import ReduceOp


def as_tensor(value: Any) -> torch.Tensor:
    """Convert a number or array to a tensor; return a tensor unchanged."""
    tensor = value if isinstance(value, torch.Tensor) else torch.as_tensor(value)
    if tensor.layout is not torch.strided:
        layout = str(tensor.layout).removeprefix("torch.")
        raise TypeError(
            f"expected a dense tensor, got a {layout} tensor of shape {tuple(tensor.shape)}: use "
            "tensor.to_dense()"
        )
    return tensor


def as_floating(tensor: torch.Tensor) -> torch.Tensor:
    """Convert integers and bools to torch's default dtype, for a mean."""
    if tensor.is_floating_point() or tensor.is_complex():
        return tensor
    return tensor.to(torch.get_default_dtype())


def all_reduce(communicator: Communicator | None, op: ReduceOp, value: Any) -> torch.Tensor:
    """Reduce over all ranks into a new tensor; None stands for a world of one."""
    tensor = as_tensor(value)
    if op == "mean":
        tensor = as_floating(tensor)
    if tensor.requires_grad and op in ("sum", "mean"):
        return _AllReduce.apply(tensor, communicator, op)  # type: ignore[no-any-return,no-untyped-call]
    return _reduced(communicator, op, tensor)


def all_gather(communicator: Communicator | None, value: Any, axis: int) -> torch.Tensor:
    """Join the tensors of all ranks along `axis`, the only axis that may differ in size."""
    tensor = as_tensor(value)
    shapes = [tuple(tensor.shape)]
    if communicator is not None:
        shapes = communicator.all_gather_object(shapes[0])
    axis = check_joinable(shapes, axis)
    sizes = tuple(shape[axis] for shape in shapes)
    if communicator is None:
        return tensor
    return _AllGather.apply(tensor, communicator, axis, sizes)  # type: ignore[no-any-return,no-untyped-call]


def with_gradient(
    tensor: torch.Tensor, change: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """Return the tensor; backward changes the gradient of the result."""
    return _ChangeGradient.apply(tensor, change)  # type: ignore[no-any-return,no-untyped-call]


def check_joinable(shapes: list[tuple[int, ...]], axis: int) -> int:
    """Check that tensors of these shapes can be joined along `axis`; return it as non-negative."""
    n_axes = len(shapes[0])
    if any(len(shape) == 0 for shape in shapes):
        raise ValueError(f"gather needs tensors of at least one dimension, got shapes {shapes}")
    if not -n_axes <= axis < n_axes:
        raise ValueError(f"gather: axis {axis} is out of range for shapes {shapes}")
    axis %= n_axes
    others = {shape[:axis] + shape[axis + 1 :] for shape in shapes}
    if len(others) != 1 or len({len(shape) for shape in shapes}) != 1:
        raise ValueError(
            f"gather along axis {axis}: other dimensions differ, got shapes {shapes}; pad them to "
            "one shape, or gather lists of tensors by fastdist.all_gather_object(value)"
        )
    return axis


def _reduced(communicator: Communicator | None, op: ReduceOp, tensor: torch.Tensor) -> torch.Tensor:
    result = tensor.detach().clone(memory_format=torch.contiguous_format)
    if communicator is not None:
        communicator.all_reduce(result, op)
    return result


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, communicator: Communicator | None, op: ReduceOp
    ) -> torch.Tensor:
        ctx.communicator, ctx.op = communicator, op
        return _reduced(communicator, op, tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        return all_reduce(ctx.communicator, ctx.op, gradients[0]), None, None


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        tensor: torch.Tensor,
        communicator: Communicator,
        axis: int,
        sizes: tuple[int, ...],
    ) -> torch.Tensor:
        ctx.communicator, ctx.axis, ctx.sizes = communicator, axis, sizes
        rows = tensor.detach().resolve_conj().resolve_neg().movedim(axis, 0).contiguous()
        splits = None if len(set(sizes)) == 1 else sizes
        return communicator.all_gather(rows, splits=splits).movedim(0, axis)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        if len(set(ctx.sizes)) == 1 and ctx.sizes[0] > 0:
            rows = gradients[0].movedim(ctx.axis, 0).contiguous()
            part = ctx.communicator.reduce_scatter(rows, "sum")
            return part.movedim(0, ctx.axis), None, None, None
        total = all_reduce(ctx.communicator, "sum", gradients[0])
        rank = ctx.communicator.rank
        own = total.narrow(ctx.axis, sum(ctx.sizes[:rank]), ctx.sizes[rank])
        return own, None, None, None


class _ChangeGradient(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, change: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        ctx.change = change
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        return ctx.change(gradients[0]), None
