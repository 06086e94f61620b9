"""Makes the losses of replicas, averaged with their examples as weights, the loss of all examples.

Keras divides the sum of a loss by the number of its values, which needs nothing, by the number of
unmasked values, or by the sum of the sample weights; or not at all.
"""

from __future__ import annotations

from typing import Any

import keras
import torch

from fastdist.integrations.keras.internals import apply_mask, get_keras_mask
from fastdist.replicas.context import state


def share_losses(model: Any) -> None:
    """Adapt the losses that a model was compiled with, once they are built."""
    compiled = model._compile_loss
    if compiled is None or not compiled.built:
        return
    compiled._flat_losses = [
        entry
        if isinstance(entry.loss, _SharedLoss)
        else entry._replace(loss=_SharedLoss(entry.loss))
        for entry in compiled._flat_losses
    ]


class _SharedLoss:
    """A compiled loss, scaled by this replica's part in the divisor of all replicas.

    Args:
        loss: the loss; its method `call` is replaced, to see the mask of its result.
    """

    def __init__(self, loss: Any) -> None:
        self._loss = loss
        self._mask: Any = None
        call = loss.call

        def noted(*args: Any, **kwargs: Any) -> Any:
            values = call(*args, **kwargs)
            self._mask = get_keras_mask(values)
            return values

        loss.call = noted

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loss, name)

    def __call__(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        mask = get_keras_mask(y_pred)
        value = self._loss(y_true, y_pred, sample_weight)
        if self._mask is not None:
            mask = self._mask if mask is None else mask & self._mask
        reduction = self._loss.reduction
        if reduction == "sum":
            return value * _batch_share()
        if reduction in ("mean", "sum_over_batch_size") and mask is not None:
            return value * _part_in(mask.sum())
        if reduction == "mean_with_sample_weight":
            if sample_weight is not None:
                sample_weight = keras.ops.convert_to_tensor(sample_weight, dtype=value.dtype)
            weights = apply_mask(sample_weight, mask, dtype=value.dtype, reduction=reduction)
            return value if weights is None else value * _part_in(weights.sum())
        return value


def _batch_share() -> float:
    """Return the global batch size over this replica's; 0 for a replica without examples.

    A sum over this replica's examples times this number, averaged over replicas with their
    examples as weights, is the sum over all examples.
    """
    context = state.replica
    if context is None or context.examples is None:
        return 1.0
    own = context.examples[context.replica_id_in_sync_group]
    return sum(context.examples) / own if own else 0.0


def _part_in(divisor: torch.Tensor) -> float:
    """Return the factor that turns a division by `divisor` into one by its sum over replicas."""
    context = state.replica
    if context is None or context.examples is None or divisor.is_meta:
        return 1.0
    share = _batch_share()
    # A replica without examples computes a borrowed one.
    own = divisor.detach().double() if share else torch.zeros((), dtype=torch.float64)
    total = float(context.all_reduce("sum", own))
    return float(own) * share / total if total else 0.0
