"""The contents of a scope, as sent to workers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fastdist.ps.coordinator.shipping import Definition, Definitions
from fastdist.ps.model.plan import Placement, tensors_in
from fastdist.ps.model.table_weight import TableWeight, table_weight
from fastdist.training.modules import modules_of


@dataclass(frozen=True, slots=True, eq=False)
class Bundle:
    """Modules and optimizers of one scope, and the placement of their values."""

    prefix: str  # what the names of its values begin with
    roots: tuple[nn.Module, ...]
    optimizers: tuple[torch.optim.Optimizer, ...]
    others: tuple[Any, ...]  # schedulers and gradient scalers
    placements: tuple[Placement, ...]
    first_optimizer: int  # the number of the first optimizer, counted over all scopes
    concurrency: int  # functions that may change the values without knowing of each other

    def parts(self) -> list[Any]:
        """Return all objects that functions may refer to, in the same order on all tasks."""
        tensors = [tensor for _, tensor in tensors_in(self.roots)]
        return [*modules_of(self.roots), *self.optimizers, *self.others, *tensors]


def define_bundle(
    definitions: Definitions, bundle: Bundle, adopt: Callable[[Bundle], list[Any]]
) -> Definition:
    """Define a bundle: functions refer to its parts instead of pickling them.

    Args:
        adopt: a function that takes the bundle on each worker, and returns its parts.
    """
    tensors = [tensor for _, tensor in tensors_in(bundle.roots)]
    hollow = {
        id(tensors[placement.tensor]): _reduce_without_values(tensors[placement.tensor])
        for placement in bundle.placements
        if not placement.is_buffer
    }
    definition = definitions.define(
        functools.partial(adopt, bundle), replacements=hollow, is_state=True
    )
    for number, part in enumerate(bundle.parts()):
        definitions.name(part, definition, number)
    return definition


def _reduce_without_values(parameter: torch.Tensor) -> tuple[Any, ...]:
    """Return the pickle reduction of a parameter without its values."""
    shape, dtype = tuple(parameter.shape), parameter.dtype
    if isinstance(parameter, TableWeight):
        return table_weight, (*shape, dtype)
    return _zeros, (shape, dtype)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(torch.zeros(shape, dtype=dtype))
