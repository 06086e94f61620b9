"""Scales replicas' losses so that their mean, weighted by examples, is the loss of all examples.

Keras divides the sum of a loss by the number of its values (then nothing is scaled), by the number
of unmasked values or the sum of the sample weights, or by nothing.
"""

from __future__ import annotations

import warnings
from typing import Any

import keras
import torch

from fastdist.errors import UnsupportedError
from fastdist.keras.internals import apply_mask, get_keras_mask
from fastdist.replicas.context import state
from fastdist.training.patched import replaced

_JUDGED = 3  # batches in which a loss is judged


def share_losses(model: Any) -> None:
    """Adapt the losses that a model was compiled with, once they are built."""
    compiled = getattr(model, "_compile_loss", None)
    if compiled is None or not compiled.built:
        return
    compiled._flat_losses = [
        entry
        if isinstance(entry.loss, _SharedLoss)
        else entry._replace(loss=_SharedLoss(entry.loss))
        for entry in compiled._flat_losses
    ]


class _SharedLoss:
    """A compiled loss, scaled by this replica's share of the divisor of all replicas."""

    def __init__(self, loss: Any) -> None:
        is_fraction = isinstance(loss, (keras.losses.Dice, keras.losses.Tversky))
        if is_fraction and loss.axis is None:
            raise UnsupportedError(
                f"{type(loss).__name__} without axis is one fraction over the whole batch, which "
                "replicas cannot compute apart; give axis the axes of one example, such as "
                "(1, 2, 3)"
            )
        self._loss = loss
        self._to_judge = _JUDGED

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loss, name)

    def __call__(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        mask = get_keras_mask(y_pred)
        if mask is not None and isinstance(sample_weight, torch.Tensor):
            sample_weight = sample_weight.clone()  # Keras multiplies it by this part's mask
        value, result, given = self._call(y_true, y_pred, sample_weight)
        own_mask = get_keras_mask(result)
        if own_mask is not None:
            mask = own_mask if mask is None else mask & own_mask
        if self._to_judge:
            self._judge(result, given)
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

    def _call(self, *args: Any) -> tuple[Any, Any, tuple[Any, ...]]:
        """Call the loss; return its value, and the result and arguments of its method `call`."""
        calls: list[tuple[Any, tuple[Any, ...]]] = []
        call = self._loss.call

        def noted(*args: Any) -> Any:
            calls.append((call(*args), args))
            return calls[-1][0]

        with replaced(self._loss, "call", noted):
            return self._loss(*args), *calls[0]

    def _judge(self, result: torch.Tensor, given: tuple[Any, ...]) -> None:
        """Warn, once, of a loss that is not computed for each example by itself.

        In a single batch the examples may have nothing in common.
        """
        is_alone = tuple(result.shape[:1]) == (1,)  # which tells nothing
        if result.is_meta or is_alone or torch.compiler.is_compiling():
            return
        self._to_judge -= 1
        if not result.ndim:
            warnings.warn(
                f"the loss {self._loss.name!r} returns one number for a batch. Replicas average "
                "it, weighted by their examples, which is the loss of the global batch if it is a "
                "mean over examples. A loss that returns a value for each example, which depends "
                "on no other example, is always right",
                stacklevel=3,
            )
            self._to_judge = 0
        elif self._compares_examples(result, given):
            warnings.warn(
                f"the loss {self._loss.name!r} compares the examples of a batch with each other, "
                "and each replica has its part of them alone: the loss is not that of the global "
                "batch. Gather what it compares: x = fastdist.get_replica_context().all_gather(x) "
                "in its call, which returns the values of this replica's rows",
                stacklevel=3,
            )
            self._to_judge = 0

    @torch.no_grad()
    def _compares_examples(self, result: torch.Tensor, given: tuple[Any, ...]) -> bool:
        """Return True if the first half of a batch has other losses without the second half."""
        count = len(result)
        half = count // 2

        def first(leaf: Any) -> Any:
            rows = isinstance(leaf, torch.Tensor) and tuple(leaf.shape[:1]) == (count,)
            return leaf[:half] if rows else leaf

        def loss_of(arguments: Any) -> torch.Tensor:
            losses: torch.Tensor = self._loss.call(*arguments)
            return losses[:half].double()

        expected = result[:half].double()
        halved = loss_of(keras.tree.map_structure(first, given))
        if halved.shape != expected.shape or _are_close(halved, expected):
            return False
        return _are_close(loss_of(given), expected)  # it draws no random numbers


def _are_close(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.allclose(one, other, rtol=1e-3, atol=1e-5, equal_nan=True)


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
    # A replica without examples computes one borrowed example with weight 0.
    own = divisor.detach().double() if share else torch.zeros((), dtype=torch.float64)
    total = float(context.all_reduce("sum", own))
    return float(own) * share / total if total else 0.0
