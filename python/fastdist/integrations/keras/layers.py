"""Describes Keras layers to strategies: inner layers, state and random numbers."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import keras
import torch
from torch import nn

from fastdist.replicas.context import state
from fastdist.training.frameworks import frameworks

_SEED_STEP = 7919  # between the seeds of replicas


class KerasLayers:
    """Describes Keras layers to `fastdist.training` (a `Framework`)."""

    def inner(self, module: nn.Module) -> Iterable[nn.Module]:
        """Return the layers inside a layer or model; Keras does not register them with torch."""
        if not isinstance(module, keras.layers.Layer) or not hasattr(module, "_layers"):
            return ()
        layers: list[nn.Module] = module._flatten_layers(include_self=False)
        return layers

    def state(self, module: nn.Module) -> list[torch.Tensor]:
        """Return a layer's non-trainable variables, such as moving means, and its seeds."""
        if not isinstance(module, keras.layers.Layer) or not hasattr(module, "_layers"):
            return []
        seeds = [generator.state for generator in module._seed_generators]
        variables = [v for v in module._non_trainable_variables if not v.value.requires_grad]
        return [variable.value for variable in [*variables, *seeds]]

    def moving_averages(self, module: nn.Module) -> list[torch.Tensor]:
        """Return the moving statistics of a BatchNormalization."""
        if not isinstance(module, keras.layers.BatchNormalization) or not module.built:
            return []
        return [module.moving_mean.value, module.moving_variance.value]


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
