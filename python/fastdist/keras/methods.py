"""Replaces methods of Keras models, by those of a trainer or by refusals."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

from fastdist.errors import UnsupportedError

CALLS = ("fit", "evaluate", "predict", "train_on_batch", "test_on_batch", "predict_on_batch")


class Trainer:
    """An object with methods in place of those of a Keras model, which keeps the object alive."""

    def __init__(self, model: Any, strategy: Any, names: Iterable[str]) -> None:
        self._ref = weakref.ref(model)
        self.strategy = strategy
        for name in names:
            object.__setattr__(model, name, getattr(self, name))

    @property
    def _model(self) -> Any:
        return self._ref()

    def _plain(self, name: str) -> Callable[..., Any]:
        """Return the model's own method."""
        method: Callable[..., Any] = getattr(type(self._model), name).__get__(self._model)
        return method

    def _refuse_overrides(self, names: Iterable[str], why: str) -> None:
        import keras

        kind = type(self._model)
        for name in names:
            if getattr(kind, name) is not getattr(keras.Model, name):
                refuse(self._model, name, f"{kind.__name__} overrides {name}, {why}")


def trainer_of(model: Any) -> Any:
    """Return the trainer of a model that several replicas or workers train; None of others."""
    trainer = getattr(vars(model).get("fit"), "__self__", None)
    return trainer if isinstance(trainer, Trainer) else None


def refuse(model: Any, name: str, message: str) -> None:
    """Let a method of a model or layer raise UnsupportedError."""

    def refused(*_: Any, **__: Any) -> Any:
        raise UnsupportedError(message)

    object.__setattr__(model, name, refused)


def require_parts(model: Any) -> None:
    """Check that replicas or workers can train a model, each on a part of the examples."""
    if model.jit_compile:
        raise UnsupportedError(
            f"{model.name} was compiled with jit_compile=True; torch.compile of Keras' steps is "
            "not supported on several replicas or parameter servers; leave jit_compile out"
        )
    for layer in model._flatten_layers():
        if getattr(layer, "stateful", False):
            raise UnsupportedError(
                f"{type(layer).__name__} {layer.name} has stateful=True: it keeps a state for each "
                "example of a batch, whose parts go to several replicas or workers; leave stateful "
                "out, or use OneDeviceStrategy"
            )
