"""Reduces and gathers in cross-replica context: local values first, then over processes."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite, prod
from typing import Any, Literal, TypeAlias

import numpy as np
import torch

from fastdist.collectives.autograd import all_gather, as_floating, as_tensor, check_joinable
from fastdist.collectives.communicator import Communicator
from fastdist.replicas.per_replica import VALUES, PerReplica, select

CrossReplicaOp = Literal["sum", "mean", "min", "max"]
Axes = int | tuple[int, ...] | None
Weight: TypeAlias = float | torch.Tensor | PerReplica[Any] | None
_EXTREMES = {"min": (torch.minimum, torch.amin), "max": (torch.maximum, torch.amax)}


def reduce_values(
    workers: Communicator | None,
    op: CrossReplicaOp,
    values: Sequence[object],
    axis: Axes,
    weights: Sequence[float] | None,
) -> torch.Tensor:
    """Reduce one value per replica; the result is on the first value's device.

    Args:
        values: one value for each replica of this process.
        axis: also reduce along this axis or these axes, in which the lengths of values may differ;
            None: no axis.
        weights: weights of this process's replicas in a mean; the weights of all replicas sum to 1.
    """
    tensors = [_to_tensor("reduce", value) for value in values]
    axes = None if axis is None else _axes(axis, tensors)
    if op == "mean":
        tensors = [as_floating(tensor) for tensor in tensors]
    combine, along = _EXTREMES.get(op, (torch.Tensor.add_, torch.sum))
    count = float(len(tensors))
    if axes is not None:
        count = float(sum(prod(tensor.shape[i] for i in axes) for tensor in tensors))
        tensors = [along(tensor, axes) for tensor in tensors]
    elif op == "mean" and weights is not None:
        # A replica without examples has no mean; its value, often NaN, must not count.
        tensors = [
            tensor * weight if weight else torch.zeros_like(tensor)
            for tensor, weight in zip(tensors, weights, strict=True)
        ]
    result = tensors[0].clone(memory_format=torch.contiguous_format)
    if result.dtype == torch.bool and op == "sum":
        result = result.long()  # as in torch.sum
    for tensor in tensors[1:]:
        result = combine(result, tensor.to(result.device))
    if workers is not None and (op in _EXTREMES or (op == "mean" and axes is None)):
        workers.all_reduce(result, op if op in _EXTREMES else "sum")
        count *= workers.world_size
    elif workers is not None:  # a sum too: it then differs from the collectives inside of run
        counts = torch.tensor(count, dtype=torch.float64, device=result.device)
        workers.all_reduce([result, counts])
        count = float(counts)
    if op != "mean" or (axes is None and weights is not None):
        return result
    return result / count


def weights_of(weight: Weight, workers: Communicator | None) -> tuple[float, ...] | None:
    """Return what each replica counts in a mean; None if no weight is given.

    Every replica must call, all with a weight or all without.
    """
    if weight is None:
        return None
    own: Any = select(weight)
    is_value = isinstance(own, VALUES)  # else float() would read a text
    try:
        number = float(own if is_value else "")
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(
            "weight must be a number, or a tensor of one element, got "
            f"{type(own).__name__} {own!r:.80}"
        ) from None
    weights = [number]
    if workers is not None:
        weights = workers.all_gather(np.array(weights)).tolist()
    for i, each in enumerate(weights):
        if not isfinite(each) or each < 0:
            raise ValueError(f"weight must be finite and not negative, got {each} on replica {i}")
    return tuple(weights)


def gather_values(
    workers: Communicator | None, values: Sequence[object], axis: int
) -> torch.Tensor:
    """Join the replicas' tensors along an axis, in replica order."""
    tensors = [_to_tensor("gather", value) for value in values]
    shapes = [tuple(tensor.shape) for tensor in tensors]
    if workers is not None:
        shapes = [shape for worker in workers.all_gather_object(shapes) for shape in worker]
    axis = check_joinable(shapes, axis)
    home = tensors[0].device
    joined = torch.cat([tensor.to(home) for tensor in tensors], axis)
    return joined if workers is None else all_gather(workers, joined, axis)


def _to_tensor(call: str, value: object) -> torch.Tensor:
    if not isinstance(value, VALUES):
        hint = "; fastdist.all_gather_object(value) gathers other objects"
        if value is None:
            hint = "; does the function passed to run return a value?"
        raise TypeError(f"{call}: expected tensors or numbers, got {value!r}{hint}")
    return as_tensor(value).detach()


def _axes(axis: int | tuple[int, ...], tensors: Sequence[torch.Tensor]) -> tuple[int, ...]:
    axes = (axis,) if isinstance(axis, int) else tuple(axis)
    for tensor in tensors:
        if not axes or any(not -tensor.dim() <= i < tensor.dim() for i in axes):
            raise ValueError(
                f"reduce: axis {axis} is out of range for a value of shape {tuple(tensor.shape)}"
            )
    return axes
