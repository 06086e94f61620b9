"""BatchNormalization(synchronized=True): normalizes by the examples of all replicas."""

from __future__ import annotations

import functools
import inspect
from contextlib import AbstractContextManager
from typing import Any

import keras
import torch

from fastdist.replicas.context import state
from fastdist.training.patched import replaced


def allow_synchronized() -> AbstractContextManager[None]:
    """Return a context manager in which Keras' BatchNormalization takes `synchronized=True`.

    On torch its constructor refuses it. The constructor is replaced while this is open.
    """
    original = keras.layers.BatchNormalization.__init__

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, synchronized: bool = False, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if synchronized:
            self.synchronized = True
            object.__setattr__(self, "_moments", functools.partial(_moments, self))

    __init__.__signature__ = inspect.signature(original)  # type: ignore[attr-defined]
    return replaced(keras.layers.BatchNormalization, "__init__", __init__)


def _moments(layer: Any, inputs: torch.Tensor, mask: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return mean and variance over the examples of all replicas. Every replica must call."""
    if mask is None:
        mean, variance = keras.ops.moments(inputs, axes=layer._reduction_axes)
        count = float(inputs.numel() // max(1, mean.numel()))
    else:
        mean, variance = type(layer)._moments(layer, inputs, mask)
        count = float(mask.sum())
    context = state.replica
    if context is None or context.communicator is None or inputs.is_meta:
        return mean, variance
    if context.examples is not None and not context.examples[context.replica_id_in_sync_group]:
        count = 0.0  # a borrowed example
    total = float(context.all_reduce("sum", torch.tensor(count, dtype=torch.float64)))
    share = count / total if total else 0.0
    whole = context.all_reduce("sum", mean * share)
    return whole, context.all_reduce("sum", (variance + (mean - whole) ** 2) * share)
