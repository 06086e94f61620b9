"""What was made in a scope, on its way to workers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import nn

from fastdist.ps.coordinator.shipping import Definition, Definitions
from fastdist.ps.model.plan import Place, tensors_in
from fastdist.ps.model.table_weight import TableWeight, table_weight
from fastdist.training.module_structure import modules_of


@dataclass(frozen=True, slots=True, eq=False)
class Bundle:
    """Modules, optimizers, schedulers and scalers of one scope, and where their values are.

    Attributes:
        prefix: of the names of its values.
        roots: the modules.
        optimizers: of their parameters.
        others: schedulers and gradient scalers.
        places: where the values are.
        first_optimizer: the number of the first of them among those of all scopes.
        at_once: functions that may change the values without knowing of each other.
    """

    prefix: str
    roots: tuple[nn.Module, ...]
    optimizers: tuple[torch.optim.Optimizer, ...]
    others: tuple[Any, ...]
    places: tuple[Place, ...]
    first_optimizer: int
    at_once: int

    def parts(self) -> list[Any]:
        """All that functions may refer to, in an order that is the same on all tasks."""
        tensors = [tensor for _, tensor in tensors_in(self.roots)]
        return [*modules_of(self.roots), *self.optimizers, *self.others, *tensors]


def define_bundle(
    definitions: Definitions, bundle: Bundle, adopt: Callable[[Bundle], Bundle]
) -> Definition:
    """Make functions refer to the parts of a bundle instead of pickling them.

    Args:
        definitions: of the job.
        bundle: what was made.
        adopt: what a worker does with it.
    """
    tensors = [tensor for _, tensor in tensors_in(bundle.roots)]
    served = {
        id(tensors[place.tensor]): _hollow(tensors[place.tensor])
        for place in bundle.places
        if isinstance(tensors[place.tensor], nn.Parameter)
    }
    values = tuple(getattr(bundle, field.name) for field in fields(bundle))
    definition = definitions.define(
        functools.partial(_make, adopt, values), instead=served, is_state=True
    )
    for number, part in enumerate(bundle.parts()):
        definitions.name(part, definition, number)
    return definition


def _make(adopt: Callable[[Bundle], Bundle], values: Sequence[Any]) -> Bundle:
    return adopt(Bundle(*values))


def _hollow(parameter: torch.Tensor) -> tuple[Any, ...]:
    """How to make a parameter like it, without its values."""
    shape, dtype = tuple(parameter.shape), parameter.dtype
    if isinstance(parameter, TableWeight):
        return table_weight, (*shape, dtype)
    return _zeros, (shape, dtype)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(torch.zeros(shape, dtype=dtype))
