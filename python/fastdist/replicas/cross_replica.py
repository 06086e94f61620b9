"""Reduces and gathers in cross-replica context: local values first, then over processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

from fastdist.collectives.autograd import all_gather, as_tensor, check_joinable
from fastdist.collectives.communicator import Communicator

CrossReplicaOp = Literal["sum", "mean", "min", "max"]


def reduce_values(
    workers: Communicator | None,
    op: CrossReplicaOp,
    values: Sequence[object],
    axis: int | None,
    weights: Sequence[float] | None,
) -> torch.Tensor:
    """Reduce one value per replica; the result is on the first value's device.

    Args:
        workers: connects all processes; None if this is the only process.
        op: the reduction.
        values: one value for each replica of this process.
        axis: also reduce along this axis, in which the lengths of values may differ; None: no axis.
        weights: weights of this process's replicas in a mean; the weights of all replicas sum to 1.
    """
    tensors = [as_tensor(value).detach() for value in values]
    if op in ("min", "max"):
        return _extreme(workers, op, tensors, axis)
    if op == "mean":
        tensors = [_floating(tensor) for tensor in tensors]
    if op == "mean" and axis is None:
        return _mean(workers, tensors, weights)
    count = float(len(tensors))
    if axis is not None:
        count = float(sum(tensor.shape[axis] for tensor in tensors))
        tensors = [tensor.sum(axis) for tensor in tensors]
    total = _sum(tensors)
    if workers is not None:
        counts = torch.tensor(count, dtype=torch.float64, device=total.device)
        workers.all_reduce([total, counts])
        count = float(counts)
    return total / count if op == "mean" else total


def gather_values(
    workers: Communicator | None, values: Sequence[object], axis: int
) -> torch.Tensor:
    """Join the replicas' tensors along an axis, in replica order.

    Raises:
        ValueError: a value is a scalar, or shapes differ in another dimension; the message shows
            the shapes.
    """
    tensors = [as_tensor(value).detach() for value in values]
    shapes = [tuple(tensor.shape) for tensor in tensors]
    if workers is not None:
        shapes = [shape for worker in workers.all_gather_object(shapes) for shape in worker]
    axis = check_joinable(shapes, axis)
    home = tensors[0].device
    joined = torch.cat([tensor.to(home) for tensor in tensors], axis)
    return joined if workers is None else all_gather(workers, joined, axis)


def _mean(
    workers: Communicator | None,
    tensors: Sequence[torch.Tensor],
    weights: Sequence[float] | None,
) -> torch.Tensor:
    if weights is None:
        replicas = len(tensors) * (1 if workers is None else workers.world_size)
        total = _sum(tensors)
        if workers is not None:
            workers.all_reduce(total)
        return total / replicas
    # A replica without examples has no mean; its value, often NaN, must not count.
    parts = [
        tensor * weight if weight else torch.zeros_like(tensor)
        for tensor, weight in zip(tensors, weights, strict=True)
    ]
    total = _sum(parts)
    if workers is not None:
        workers.all_reduce(total)
    return total


def _extreme(
    workers: Communicator | None,
    op: Literal["min", "max"],
    tensors: Sequence[torch.Tensor],
    axis: int | None,
) -> torch.Tensor:
    pick = torch.minimum if op == "min" else torch.maximum
    if axis is not None:
        along = torch.amin if op == "min" else torch.amax
        tensors = [along(tensor, axis) for tensor in tensors]
    result = tensors[0].clone(memory_format=torch.contiguous_format)
    for tensor in tensors[1:]:
        result = pick(result, tensor.to(result.device))
    if workers is not None:
        workers.all_reduce(result, op)
    return result


def _sum(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    total = tensors[0].clone(memory_format=torch.contiguous_format)
    for tensor in tensors[1:]:
        total += tensor.to(total.device)
    return total


def _floating(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_floating_point() or tensor.is_complex():
        return tensor
    return tensor.to(torch.get_default_dtype())
