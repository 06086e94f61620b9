"""Keras optimizers on replicas: reduces gradients that backward did not; steps one copy once."""

from __future__ import annotations

from typing import Any

import keras
import torch

from fastdist.keras.sharded_slots import shard_steps
from fastdist.replicas.context import state
from fastdist.strategies.replicated import ReplicatedStrategy


def share_steps(model: Any, strategy: ReplicatedStrategy) -> None:
    """Adapt the optimizers of a model: the one it was compiled with, and other attributes."""
    for value in list(vars(model).values()):
        if isinstance(value, keras.optimizers.Optimizer) and "apply" not in vars(value):
            value.apply = _SharedApply(value, strategy)


def gather_states(model: Any) -> None:
    """Complete the states of a model's sharded optimizers. Every replica must call."""
    for shared in _shared(model):
        for sharded in shared.sharded:
            sharded.gather()


def make_room(model: Any) -> None:
    """Make room for all states of a model's optimizers, which are about to be loaded."""
    for shared in _shared(model):
        for sharded in shared.sharded:
            sharded.release()


def _shared(model: Any) -> list[_SharedApply]:
    found = [vars(v).get("apply") for v in vars(model).values() if hasattr(v, "__dict__")]
    return [apply for apply in found if isinstance(apply, _SharedApply)]


class _SharedApply:
    """The method `apply` of an optimizer, for all replicas together."""

    def __init__(self, optimizer: Any, strategy: ReplicatedStrategy) -> None:
        self.sharded = []
        if strategy.options.shard_optimizer:
            self.sharded = shard_steps(optimizer, strategy._connected)
        self._apply = optimizer.apply
        self._optimizer = optimizer
        self._strategy = strategy
        self._is_central = False  # True once the optimizer's variables are in the one copy

    def __call__(self, grads: Any, trainable_variables: Any = None) -> None:
        context = state.replica
        if context is None or context.communicator is None:
            self._apply(grads, trainable_variables)
            return
        workers, optimizer, central = context.communicator, self._optimizer, self._strategy.central
        grads = list(grads)
        if trainable_variables is not None:
            _reduce_missing(grads, list(trainable_variables), context)
        self._strategy.note_step()
        if central is None:
            self._apply(grads, trainable_variables)
            return
        if not self._is_central:
            if not optimizer.built:
                optimizer.build(trainable_variables)
            central.take_parameters(workers, [v.value for v in _changed_by_steps(optimizer)])
            self._is_central = True
        central.step_once(workers, lambda: self._apply(grads, trainable_variables))


def _changed_by_steps(optimizer: Any) -> list[Any]:
    """Return the variables without learning rates, which callbacks set on each replica."""
    inner = getattr(optimizer, "inner_optimizer", None)
    rates = [getattr(each, "_learning_rate", None) for each in (optimizer, inner)]
    return [v for v in optimizer.variables if not any(v is rate for rate in rates)]


def _reduce_missing(grads: list[Any], variables: list[Any], context: Any) -> None:
    """Average gradients that did not come from `backward`, such as those of torch.autograd.grad.

    The gradients of backward are those of the global batch already, and stay in `.grad` until the
    next step. If they were removed before, averaging equal gradients changes nothing.
    """
    missing = [
        i
        for i, (grad, variable) in enumerate(zip(grads, variables, strict=True))
        if grad is not None and getattr(variable, "value", variable).grad is None
    ]
    if not missing:
        return
    share = context.relative_weight / context.num_replicas_in_sync
    parts = [grads[i] * share if share else torch.zeros_like(grads[i]) for i in missing]
    context.communicator.all_reduce(parts)
    for i, part in zip(missing, parts, strict=True):
        grads[i] = part
