"""Batches that are padded to a common length, and computations that exclude the padding.

One program with fixed shapes serves full and uneven batches. Each replica's batch has as many rows
as the longest, and a count, which is data rather than a constant, gives the number of examples
among them. While a run is traced, the axis of examples is followed from the batch through torch's
functions. Functions that sum or average over it (losses, `sum`, `mean`, batch normalization) are
traced so that they exclude padding. Other functions that combine examples are refused if the batch
is uneven.
"""

from __future__ import annotations

import inspect
import math
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from fastdist.errors import UnsupportedError

Place = tuple[int, int]  # the axis of examples, and the number of rows of each
_Function = Callable[..., Any]  # of torch


class Padding:
    """The padding of a batch, as traced values of the running replica.

    Args:
        rows: the number of rows of each replica's batch.
        count: the number of rows that are examples; a float tensor without axes.
        weight: the replica's share of all examples, relative to the average share.
        sizes: the examples of each replica.
    """

    def __init__(
        self, rows: int, count: torch.Tensor, weight: torch.Tensor, sizes: tuple[int, ...]
    ) -> None:
        self.rows = rows
        self.count = count
        self.weight = weight
        self.sizes = sizes
        self.is_uneven = any(size != rows for size in sizes)
        self.mask = torch.arange(rows, device=count.device) < count
        self._known: dict[int, tuple[weakref.ref[torch.Tensor], int, int]] = {}

    def follow(self, tensor: torch.Tensor, axis: int = 0, repeats: int = 1) -> None:
        """Record the axis of examples of a tensor; each example has `repeats` rows."""
        self._known[id(tensor)] = weakref.ref(tensor), axis, repeats

    def place_in(self, tensor: torch.Tensor) -> Place | None:
        """Return the axis of examples and the rows per example, or None if there is no axis."""
        known = self._known.get(id(tensor))
        return None if known is None or known[0]() is not tensor else known[1:]

    def call(self, func: _Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Call a function of torch, without the padding."""
        source = next((t for t in tensors_in((args, kwargs)) if self.place_in(t) is not None), None)
        if source is None:
            return func(*args, **kwargs)
        place = self.place_in(source)
        assert place is not None
        name = getattr(func, "__name__", "")
        handler = _HANDLERS.get(name)
        if handler is not None:
            return handler(self, func, source, place, args, kwargs)
        if name == "__len__" and self.is_uneven:
            warnings.warn(
                "len() of an uneven batch on XLA devices includes padding; "
                "fd.get_replica_context().examples has the numbers of examples",
                stacklevel=4,
            )
        result = func(*args, **kwargs)
        for tensor in tensors_in(result):
            axis, repeats = self._axis_after(name, tensor, place, args, kwargs)
            if axis is not None:
                self.follow(tensor, axis, repeats)
            elif self.is_uneven and name not in _HARMLESS and tensor.is_floating_point():
                raise UnsupportedError(
                    f"{name} joins the examples of an uneven batch, which has rows of padding "
                    f"(result of shape {tuple(tensor.shape)}): sum or average over examples with "
                    "torch's sum, mean or losses, or use drop_remainder=True"
                )
        return result

    def _axis_after(
        self, name: str, result: torch.Tensor, place: Place, args: Any, kwargs: Any
    ) -> tuple[int | None, int]:
        axis, repeats = place
        mover = _MOVERS.get(name)
        if mover is not None:
            moved = mover(axis, result.dim(), args, kwargs)
            if moved is None:
                return None, 1
            axis = moved
        length = self.rows * repeats
        if result.dim() > axis and result.shape[axis] == length:
            return axis, repeats
        reshaped = name in ("reshape", "view", "flatten", "contiguous", "unflatten")
        if reshaped and axis == 0 and result.dim() and result.shape[0] % self.rows == 0:
            return 0, result.shape[0] // self.rows
        return None, 1

    def mask_for(self, tensor: torch.Tensor, place: Place) -> torch.Tensor:
        """Return the mask of examples, in a shape that broadcasts to the tensor's."""
        axis, repeats = place
        mask = self.mask if repeats == 1 else self.mask.repeat_interleave(repeats)
        shape = [1] * tensor.dim()
        shape[axis] = mask.shape[0]
        return mask.view(shape)


def tensors_in(structure: Any) -> list[torch.Tensor]:
    """Return the tensors in nested tuples, lists and dicts."""
    if isinstance(structure, torch.Tensor):
        return [structure]
    if isinstance(structure, dict):
        structure = tuple(structure.values())
    if isinstance(structure, (tuple, list)):
        return [tensor for inner in structure for tensor in tensors_in(inner)]
    return []


# --- functions that exclude padding -------------------------------------------------------------


def _sum_or_mean(
    padding: Padding, func: _Function, source: torch.Tensor, place: Place, args: Any, kwargs: Any
) -> Any:
    given = dict(zip(("input", "dim", "keepdim"), args, strict=False)) | kwargs
    value = given.get("input", source)
    dims = given.get("dim", given.get("axis"))
    axes = range(value.dim()) if dims is None or dims == () else dims
    axes = [a % value.dim() for a in ([axes] if isinstance(axes, int) else axes)]
    keep = bool(given.get("keepdim", given.get("keepdims", False)))
    if value is not source or place[0] not in axes:
        result = func(*args, **kwargs)
        if value is source:
            left = place[0] if keep else place[0] - sum(a < place[0] for a in axes)
            padding.follow(result, left, place[1])
        return result
    dtype = given.get("dtype")
    mask = padding.mask_for(value, place)
    total = torch.where(mask, value, 0).sum(axes, keepdim=keep, dtype=dtype)
    if getattr(func, "__name__", "") == "sum":
        return total
    others = math.prod(value.shape[axis] for axis in axes)
    return total / (padding.count.clamp(min=1) * (others / padding.rows)).to(total.dtype)


def _loss(
    padding: Padding, func: _Function, source: torch.Tensor, place: Place, args: Any, kwargs: Any
) -> torch.Tensor:
    bound = inspect.signature(func).bind(*args, **kwargs)
    bound.apply_defaults()
    given = bound.arguments
    if given.get("size_average") is not None or given.get("reduce") is not None:
        raise UnsupportedError("size_average and reduce are deprecated; use reduction=")
    reduction = given["reduction"]
    given["reduction"] = "none"
    if given.get("log_target") is None:
        given.pop("log_target", None)
    losses: torch.Tensor = func(*bound.args, **bound.kwargs)
    axis, repeats = place
    if losses.dim() <= axis or losses.shape[axis] != padding.rows * repeats:
        raise UnsupportedError(
            f"{func.__name__}: losses of shape {tuple(losses.shape)} have no axis of examples"
        )
    if reduction == "none":
        padding.follow(losses, axis, repeats)
        return losses
    mask = padding.mask_for(losses, place)
    total = torch.where(mask, losses, 0).sum()
    if reduction == "sum":
        return total
    if reduction == "batchmean":
        return total / (padding.count.clamp(min=1) * repeats)
    target = given.get("target")
    if "ignore_index" in given and target is not None and not target.is_floating_point():
        counted = (target != given["ignore_index"]) & mask
        weights = counted.to(losses.dtype)
        if given.get("weight") is not None:
            weights = weights * given["weight"][target.clamp(min=0)]
        whole = weights.sum()
        return total / torch.where(whole == 0, torch.ones_like(whole), whole)
    others = losses.numel() / padding.rows
    mean: torch.Tensor = total / (padding.count.clamp(min=1) * others)
    return mean


_Handler = Callable[[Padding, _Function, torch.Tensor, Place, Any, Any], Any]
_LOSSES = (
    *("cross_entropy", "nll_loss", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"),
    *("binary_cross_entropy", "binary_cross_entropy_with_logits", "kl_div", "poisson_nll_loss"),
    *("gaussian_nll_loss", "hinge_embedding_loss", "margin_ranking_loss", "soft_margin_loss"),
    *("cosine_embedding_loss", "multi_margin_loss", "multilabel_margin_loss"),
    *("multilabel_soft_margin_loss", "triplet_margin_loss", "triplet_margin_with_distance_loss"),
)
assert all(hasattr(F, name) for name in _LOSSES)
_HANDLERS: dict[str, _Handler] = {
    "sum": _sum_or_mean,
    "mean": _sum_or_mean,
    **dict.fromkeys(_LOSSES, _loss),
}


def _swapped(axis: int, dims: int, args: Any, kwargs: Any) -> int | None:
    one, other = (*args[1:3], *kwargs.values())[:2]
    if not isinstance(one, int) or not isinstance(other, int):
        return None
    one, other = one % dims, other % dims
    return other if axis == one else one if axis == other else axis


def _permuted(axis: int, dims: int, args: Any, kwargs: Any) -> int | None:
    order = args[1:] or tuple(kwargs.values())
    order = order[0] if len(order) == 1 and isinstance(order[0], (tuple, list)) else order
    return [int(d) % dims for d in order].index(axis)


def _unsqueezed(axis: int, dims: int, args: Any, kwargs: Any) -> int | None:
    at = (*args[1:2], *kwargs.values())[0] % dims
    return axis + 1 if at <= axis else axis


_MOVERS: dict[str, Callable[[int, int, Any, Any], int | None]] = {
    **dict.fromkeys(("transpose", "swapaxes", "swapdims"), _swapped),
    "permute": _permuted,
    "t": lambda axis, dims, args, kwargs: 1 - axis if dims == 2 else None,
    "unsqueeze": _unsqueezed,
}
# Results of these functions do not depend on examples.
_HARMLESS = frozenset({"__get__", "new_zeros", "new_empty", "new_ones", "new_full", "new_tensor"})
