"""The trainer of one Keras model under parameter servers: workers run the steps of its `fit`.

Keras' own `fit` runs on the chief, with a train function that waits for a step of the workers.
Everything else is Keras' own, with the servers' values.
"""

from __future__ import annotations

import functools
import inspect
from contextlib import suppress
from typing import Any

import keras

from fastdist.errors import UnsupportedError
from fastdist.keras.callback_list import flat, overrides
from fastdist.keras.internals import KerasSaveable, TrackedDict, TrackedList
from fastdist.keras.layers import separate_random_numbers
from fastdist.keras.methods import Trainer, refuse, require_parts
from fastdist.keras.served_optimizers import ServedApply, require_served, served_optimizer
from fastdist.keras.served_steps import ScheduledSteps
from fastdist.ps.coordinator.cluster_coordinator import ClusterCoordinator
from fastdist.ps.coordinator.shipping import Reduction, reducers

_OWN = ("fit", "compile", "make_train_function", "_get_metrics_result_or_logs")
_AFTER_JOIN = (
    "evaluate",
    "predict",
    "test_on_batch",
    "predict_on_batch",
    "get_weights",
    "set_weights",
    "load_weights",
    "save",
    "save_weights",
)
_NO_TRAIN_ON_BATCH = (
    "train_on_batch under ParameterServerStrategy: workers read their own batches; write "
    "fit(make_dataset, steps_per_epoch=1)"
)
_OF_STEPS = ("on_batch_begin", "on_batch_end", "on_train_batch_begin", "on_train_batch_end")
# Arguments of fit that belong to data of the chief.
_OF_ARRAYS = ("y", "batch_size", "validation_split", "class_weight", "sample_weight")

# Attributes that stay on the chief, besides the methods that a trainer replaces.
_OF_CHIEF = ("history", "train_function", "test_function", "predict_function")
_LEFT_OUT = frozenset((*_OF_CHIEF, *_OWN, *_AFTER_JOIN, "train_on_batch", "_post_build"))


def _reduce(thing: Any) -> Reduction | None:
    """Pickle Keras' objects for workers one by one, with the variables they share.

    Keras' own pickles are files of `model.save`, which cannot leave parameters on servers.
    """
    if isinstance(thing, KerasSaveable):
        state = vars(thing)
        if isinstance(thing, keras.Model):
            state = {name: value for name, value in state.items() if name not in _LEFT_OUT}
            state |= dict.fromkeys(_OF_CHIEF)
        return object.__new__, (type(thing),), _unwound(state)
    if isinstance(thing, TrackedList):  # needs its tracker before its items
        return type(thing), (), None, iter(thing)
    if isinstance(thing, TrackedDict):
        return type(thing), (), None, None, iter(thing.items())
    return None


def _unwound(state: dict[str, Any]) -> dict[str, Any]:
    """Return a state in an order in which deep models need no deep recursion.

    A model's layers come first, from input to output, and do not know which layers follow.
    """
    layers = {"_layers": state["_layers"]} if "_layers" in state else {}
    outbound: dict[str, Any] = {"_outbound_nodes": []} if "_outbound_nodes" in state else {}
    return layers | state | outbound


reducers[:] = [_reduce]


class ServedTrainer(Trainer):
    """Replaces the training methods of a Keras model on the chief of a ParameterServerStrategy."""

    def __init__(self, model: Any, strategy: Any) -> None:
        super().__init__(model, strategy, _OWN)
        self._coordinator: ClusterCoordinator | None = None  # keeps it alive
        self._steps: ScheduledSteps | None = None  # of a running fit
        self._trained: set[int] = set()  # ids of variables whose values are on servers
        for name in _AFTER_JOIN:
            object.__setattr__(model, name, functools.partial(self._joined, name))
        refuse(model, "train_on_batch", _NO_TRAIN_ON_BATCH)
        self._refuse_overrides(["fit"], "whose steps workers run; override train_step instead")

    def _joined(self, name: str, *args: Any, **options: Any) -> Any:
        """Call the model's own method, once scheduled functions have ended."""
        coordinator = self.strategy.coordinator()
        if coordinator is not None:
            coordinator.join()
        return self._plain(name)(*args, **options)

    def compile(self, *args: Any, **options: Any) -> None:
        """Compile the model, before its first fit."""
        if self._trained:
            raise UnsupportedError(
                "compile after a fit under ParameterServerStrategy: workers have the model, and "
                "servers its optimizer, as they were in the first fit; compile the model before"
            )
        self._plain("compile")(*args, **options)
        if self._model.optimizer is not None:
            self._model.optimizer.built = True  # the servers have its variables

    def fit(self, *args: Any, **options: Any) -> Any:
        """Train on the workers.

        Args:
            x: a function that each worker calls with its `fd.InputContext`; it returns an iterable
                over batches (x, y) or (x, y, sample_weight), and is called again at their end.
            steps_per_epoch: steps of an epoch, of all workers.

        The other arguments are those of Keras' `Model.fit`; the data of an evaluation is read on
        the chief.
        """
        plain = self._plain("fit")
        given = inspect.signature(plain).bind(*args, **options).arguments
        model = self._model
        make_dataset = given.pop("x", None)
        if not model.compiled:
            return plain(make_dataset, **given)  # raises Keras' error
        _require_function(make_dataset, given)
        callbacks = flat(given.get("callbacks"))
        if any(isinstance(each, keras.callbacks.BackupAndRestore) for each in callbacks):
            raise UnsupportedError(
                "keras.callbacks.BackupAndRestore does not save the state that servers have of the "
                "optimizer; use fastdist.keras.BackupAndRestore"
            )
        self._require_servable()
        coordinator = self.strategy.coordinator() or ClusterCoordinator(self.strategy)
        self._coordinator = coordinator
        try:
            self._steps = ScheduledSteps(
                model,
                coordinator,
                make_dataset,
                given["steps_per_epoch"],
                reads_logs=given.get("verbose", "auto") in ("auto", 1)
                or overrides(callbacks, *_OF_STEPS),
            )
            history = plain(self._steps, **given)
        except Exception:
            with suppress(Exception):
                coordinator.join()  # for steps that have begun
            raise
        finally:
            self._steps = None
        self.strategy.before_calls()  # sends what callbacks have restored at the end
        return history

    def make_train_function(self, force: bool = False) -> None:
        """Make the function that waits for a step, once the servers have the model's values."""
        del force
        steps = self._steps
        if steps is None:
            raise UnsupportedError(
                "a Keras model under ParameterServerStrategy trains in fit alone, on its workers"
            )
        if not self._trained:
            self._put_on_servers(self._model)
        self._model.train_function = lambda _: steps.step()

    def _get_metrics_result_or_logs(self, logs: Any) -> Any:
        """Return the metrics of an epoch, or the logs of steps that have logs of their own."""
        if self._steps is not None and self._steps.is_in_epoch:
            logs = self._steps.end_epoch()
        return self._plain("_get_metrics_result_or_logs")(logs)

    def _require_servable(self) -> None:
        model = self._model
        require_parts(model)
        require_served(model.optimizer)
        for name, value in vars(model).items():
            is_other = isinstance(value, keras.optimizers.Optimizer) and name != "optimizer"
            if is_other and value is not model.optimizer:
                raise UnsupportedError(
                    f"{type(model).__name__}.{name} is a second optimizer; parameter servers apply "
                    "the one that the model was compiled with"
                )
        for variable in model.trainable_variables:
            if self._trained and id(variable) not in self._trained:
                raise UnsupportedError(
                    f"{variable.path} was not trainable in the first fit, so that no server has it"
                )

    def _put_on_servers(self, model: Any) -> None:
        variables = model.trainable_variables
        for variable in variables:
            if variable.constraint is not None:
                raise UnsupportedError(
                    f"{variable.path} has the constraint {type(variable.constraint).__name__}, "
                    "which parameter servers cannot apply; leave it out, or use a regularizer"
                )
            if getattr(variable, "overwrite_with_gradient", False):
                raise UnsupportedError(
                    f"{variable.path} is overwritten with its gradient, as float8 layers do, which "
                    "parameter servers cannot do"
                )
        separate_random_numbers(model)
        # In every fit and evaluate Keras registers them with torch again, as if they had changed.
        model._track_variables()
        object.__setattr__(model, "_post_build", lambda: None)
        served = served_optimizer(model.optimizer, variables)
        model.optimizer.apply = ServedApply(model.optimizer, served, variables)
        self.strategy._adopt([model], [served])
        self._trained = set(map(id, variables))


def _require_function(make_dataset: object, given: dict[str, Any]) -> None:
    how = (
        "write fit(make_dataset, steps_per_epoch=...), with a function make_dataset(context) that "
        "returns an iterable over the batches (x, y) of one worker"
    )
    if not callable(make_dataset):
        raise UnsupportedError(
            "fit under ParameterServerStrategy needs a function that makes the batches of a "
            f"worker, got {type(make_dataset).__name__}; {how}"
        )
    for name in _OF_ARRAYS:
        value = given.get(name)
        if value is not None and not (name == "validation_split" and value == 0):
            raise UnsupportedError(
                f"fit under ParameterServerStrategy takes no {name}, because workers make their "
                f"own batches (x, y, sample_weight); {how}"
            )
    steps = given.get("steps_per_epoch")
    if type(steps) is not int or steps < 1:
        raise UnsupportedError(
            "fit under ParameterServerStrategy needs steps_per_epoch, a number of steps of all "
            f"workers together, got {steps!r}; {how}"
        )
