"""Keras layers on replicas: what strategies know of them, random numbers, BatchNormalization."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

import keras
import torch
from torch import nn

from fastdist.replicas.context import state
from fastdist.training.frameworks import frameworks
from fastdist.training.patched import replaced

_SEED_STEP = 7919  # between the seeds of replicas


class KerasLayers:
    """Describes Keras layers to `training.frameworks`; returns nothing for other modules."""

    def inner(self, module: nn.Module) -> Iterable[nn.Module]:
        """Return the layers inside a layer or model; Keras does not register them with torch."""
        if not isinstance(module, keras.layers.Layer) or not hasattr(module, "_layers"):
            return ()
        layers: list[nn.Module] = module._flatten_layers(include_self=False)
        return layers

    def state(self, module: nn.Module) -> dict[str, torch.Tensor]:
        """Return a layer's non-trainable variables, such as moving means, and its seeds."""
        if not isinstance(module, keras.layers.Layer) or not hasattr(module, "_layers"):
            return {}
        seeds = [generator.state for generator in module._seed_generators]
        return {variable.path: variable.value for variable in [*_untrained(module), *seeds]}

    def moving_averages(self, module: nn.Module) -> list[torch.Tensor]:
        """Return the moving statistics of a BatchNormalization, and variables that are means."""
        if not isinstance(module, keras.layers.Layer) or not hasattr(module, "_layers"):
            return []
        is_norm = isinstance(module, keras.layers.BatchNormalization) and module.built
        statistics = [module.moving_mean, module.moving_variance] if is_norm else []
        means = [v for v in _untrained(module) if v.aggregation == "mean"]
        return list({id(v): v.value for v in [*statistics, *means]}.values())


def _untrained(layer: Any) -> list[Any]:
    return [v for v in layer._non_trainable_variables if not v.value.requires_grad]


frameworks.append(KerasLayers())


def separate_random_numbers(model: Any) -> None:
    """Make seeded random numbers differ between replicas or workers, by their seeds in `run`.

    The generators' states stay equal, and replica 0 draws what one device would.
    """
    for layer in model._flatten_layers():
        for generator in layer._seed_generators:
            if "next" not in generator.__dict__:
                generator.next = functools.partial(_next_seed, generator.next)


def _next_seed(plain: Any, ordered: bool = True) -> Any:
    seed = plain(ordered=ordered)
    context = state.replica
    if context is None:
        return seed
    number = context.replica_id_in_sync_group
    if context.strategy.has_servers:
        from fastdist.ps.coordinator.per_worker import get_worker_index

        number = get_worker_index()
    apart = torch.zeros_like(seed)
    apart[0] = _SEED_STEP * number
    return seed + apart


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
