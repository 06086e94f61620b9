"""Keras models as parts of checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fastdist.checkpoints.agreement import Ranks
from fastdist.checkpoints.checkpoint import Checkpoint


class KerasCheckpoint(Checkpoint):
    """A checkpoint of a built Keras model, its part "model", and of other parts."""

    def __init__(self, model: Any, **parts: Any) -> None:
        super().__init__(model=ModelVariables(model), **parts)
        self.__dict__["_keras_model"] = model

    def ranks(self) -> Ranks:
        """Return the replicas of the model."""
        return Ranks([self._keras_model])


class ModelVariables:
    """A model's weights and seeds, by number in Keras' order: names differ between two models."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the values by number."""
        return {str(i): value for i, value in enumerate(values_of(self._model.variables))}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Set the values."""
        saved = list(state.values())
        require_same_shapes("model", self._model.variables, saved)
        put_values(self._model.variables, saved)


def values_of(variables: Sequence[Any]) -> list[torch.Tensor]:
    """Return the tensors of Keras variables."""
    return [variable.value.detach() for variable in variables]


def put_values(variables: Sequence[Any], values: Sequence[torch.Tensor]) -> None:
    """Set Keras variables in place."""
    with torch.no_grad():
        for variable, value in zip(variables, values, strict=True):
            variable.value.copy_(value)


def require_same_shapes(
    name: str, variables: Sequence[Any], values: Sequence[torch.Tensor]
) -> None:
    """Check that saved values have the shapes of the variables."""
    own = [(variable.path, tuple(variable.shape)) for variable in variables]
    shapes = [tuple(value.shape) for value in values]
    if len(own) != len(shapes):
        raise ValueError(
            f"{name}: the checkpoint is of another {name}: it has {len(shapes)} variables, "
            f"expected {len(own)}"
        )
    for (path, expected), shape in zip(own, shapes, strict=True):
        if expected != shape:
            raise ValueError(
                f"{name}: the checkpoint is of another {name}: {path} has shape {shape}, "
                f"expected {expected}"
            )
