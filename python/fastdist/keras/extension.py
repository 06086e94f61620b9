"""Finds Keras models that are made in a strategy's scope, and attaches trainers."""

from __future__ import annotations

import contextlib
import functools
import gc
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import nn

from fastdist.errors import UnsupportedError
from fastdist.keras.methods import CALLS, refuse
from fastdist.strategies.base import Strategy
from fastdist.strategies.replicated import ReplicatedStrategy
from fastdist.strategies.scope import Scope
from fastdist.training.patched import replaced


class KerasExtension:
    """Adapts Keras models to strategies: one of the `extensions` of their scopes."""

    @contextlib.contextmanager
    def watch(self, scope: Scope) -> Iterator[None]:
        """Return a context manager: layers made inside belong to the scope, models get trainers.

        Keras calls `Layer.__new__` for every layer and model; it is replaced while this is open.
        BatchNormalization takes `synchronized=True`. Models made outside are not trained inside.
        """
        keras: Any = sys.modules.get("keras")
        if keras is None:
            yield
            if "keras" in sys.modules:
                _note_all(scope)
            return
        layer_class = keras.layers.Layer
        make = layer_class.__new__

        def made(cls: type, *args: Any, **kwargs: Any) -> Any:
            _require_torch(keras)
            layer = make(cls, *args, **kwargs)
            scope.note_module(layer)
            if isinstance(layer, keras.Model):
                _attach(scope.strategy, layer)
            return layer

        from fastdist.keras.layers import allow_synchronized

        own_models = _own_models_alone(keras.Model, scope.strategy)
        with replaced(layer_class, "__new__", made), allow_synchronized(), own_models:
            yield

    def adopt(self, strategy: Strategy, roots: Sequence[nn.Module]) -> Sequence[nn.Module]:
        """Attach trainers to Keras models that have none, and adapt random layers.

        Returns the modules that the strategy adopts now. The values of models go to parameter
        servers with their first fit, when they are built.
        """
        keras: Any = sys.modules.get("keras")
        layers = [] if keras is None else [r for r in roots if isinstance(r, keras.layers.Layer)]
        if not layers:
            return roots
        from fastdist.keras.layers import separate_random_numbers

        for layer in layers:
            separate_random_numbers(layer)
            if "fit" in vars(layer):
                continue
            if isinstance(layer, keras.Model):
                _attach(strategy, layer)
            elif hasattr(layer, "fit") and strategy.num_replicas_in_sync > 1:
                _refuse(layer, "trains and is no keras.Model; make it a subclass of keras.Model")
        if strategy.has_servers:
            return [root for root in roots if not isinstance(root, keras.Model)]
        return roots


@contextlib.contextmanager
def _own_models_alone(model_class: Any, strategy: Strategy) -> Iterator[None]:
    """Return a context manager that refuses to compile or train models made outside it.

    Each replica would train a separate model otherwise. Two methods of keras.Model are replaced
    while this is open, in their base class: Keras checks whether a model overrides them.
    """
    if strategy.num_replicas_in_sync == 1 and not strategy.has_servers:
        yield
        return

    def checked(plain: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(plain)
        def call(model: Any, *args: Any, **kwargs: Any) -> Any:
            if isinstance(model, model_class) and "fit" not in vars(model):
                raise ValueError(
                    f"{type(model).__name__} {model.name} was made outside the scope of "
                    f"{strategy}, which would not train it; make it in the scope, or give it to "
                    "strategy.mirror"
                )
            return plain(model, *args, **kwargs)

        return call

    with contextlib.ExitStack() as stack:
        for name in ("compile", "make_train_function"):
            owner = next(c for c in model_class.__mro__ if name in vars(c))
            stack.enter_context(replaced(owner, name, checked(vars(owner)[name])))
        yield


def _note_all(scope: Scope) -> None:
    """Record the models that were made in a scope in which Keras was imported first."""
    keras: Any = sys.modules["keras"]
    for thing in gc.get_objects():
        if isinstance(thing, keras.Model):
            _require_torch(keras)
            scope.note_module(thing)


def _require_torch(keras: Any) -> None:
    backend = keras.config.backend()
    if backend != "torch":
        raise UnsupportedError(
            f"a Keras layer was made in a strategy's scope with KERAS_BACKEND={backend!r}; "
            "fastdist trains PyTorch models: set KERAS_BACKEND=torch before keras is imported"
        )


def _attach(strategy: Strategy, model: Any) -> None:
    if not isinstance(strategy, ReplicatedStrategy):
        _refuse(
            model,
            f"was made in the scope of {type(strategy).__name__}: Keras on torch has no XLA "
            "devices; write the training loop for a torch module with strategy.run, or use "
            "MirroredStrategy, MultiWorkerMirroredStrategy, CentralStorageStrategy or "
            "ParameterServerStrategy",
        )
    elif strategy.has_servers:
        from fastdist.keras.served_trainer import ServedTrainer

        ServedTrainer(model, strategy)
    elif strategy.num_replicas_in_sync > 1 or strategy.is_elastic:
        if strategy.options.gradient_reduction == "sum":
            raise UnsupportedError(
                'Keras computes means over examples; got gradient_reduction="sum", expected "mean"'
            )
        from fastdist.keras.trainer import ReplicatedTrainer

        ReplicatedTrainer(model, strategy)
    else:
        from fastdist.keras.trainer import accept_distributed_datasets

        accept_distributed_datasets(model, strategy)


def _refuse(layer: Any, why: str) -> None:
    for name in CALLS:
        refuse(layer, name, f"{name} of {type(layer).__name__}, which {why}")
