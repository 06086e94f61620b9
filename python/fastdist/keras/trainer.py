"""The trainer of one Keras model: its fit, evaluate and predict become those of all replicas.

The model's methods are replaced on the instance; the class stays as Keras made it. Keras' own
methods run on every replica, with the replica's part of each global batch, in `strategy.run`.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras

from fastdist.collectives.communicator import Communicator
from fastdist.collectives.init import default_communicator
from fastdist.data import DistributedDataset
from fastdist.errors import UnsupportedError
from fastdist.keras.backup import ElasticFit
from fastdist.keras.callback_list import ReplicaCallbacks
from fastdist.keras.internals import (
    class_weight_to_sample_weights,
    get_data_adapter,
    results_of_metrics,
    train_validation_split,
)
from fastdist.keras.methods import CALLS, Trainer, require_parts
from fastdist.keras.metrics import combined, global_logs
from fastdist.keras.optimizers import gather_states
from fastdist.keras.steps import DistributedAdapter, PartAdapter, ReplicaSteps, cut_batch
from fastdist.replicas.context import state
from fastdist.strategies.replicated import ReplicatedStrategy

_ARRAYS = ("x", "y", "sample_weight")
_REPLACED = (
    *CALLS,
    *("make_train_function", "make_test_function", "make_predict_function"),
    *("get_metrics_result", "_get_metrics_result_or_logs"),
    *("_initialize_ddp", "save", "save_weights"),
)


def _with_arguments_of_keras(method: Callable[..., Any]) -> Callable[..., Any]:
    """Pass a method the arguments of Keras' own method by name, with the defaults."""
    own = inspect.signature(getattr(keras.Model, method.__name__))

    @functools.wraps(method)
    def call(self: Any, *args: Any, **options: Any) -> Any:
        try:
            bound = own.bind(self, *args, **options)
        except TypeError as error:
            raise TypeError(f"{method.__name__}() {error}") from None
        bound.apply_defaults()
        _, *named = bound.arguments.items()
        given = dict(named)
        given.update(given.pop("kwargs", {}))  # of evaluate
        return method(self, given)

    call.__signature__ = own  # type: ignore[attr-defined]
    return call


class ReplicatedTrainer(Trainer):
    """Replaces the training methods of a model that was made in the scope of several replicas."""

    def __init__(self, model: Any, strategy: ReplicatedStrategy) -> None:
        super().__init__(model, strategy, _REPLACED)
        self.steps = ReplicaSteps(self._ref, strategy)
        self.elastic = ElasticFit(strategy) if strategy.is_elastic else None
        self._reads_logs = False  # True in calls for one batch, whose logs are read at once
        self._refuse_overrides(
            CALLS,
            "which a strategy calls with data that is divided among the replicas; override "
            "train_step, test_step, predict_step or compute_loss instead",
        )

    @contextlib.contextmanager
    def communicator(self) -> Iterator[Communicator]:
        """Return a context manager around communication outside `run`."""
        with self.strategy.communicator() as workers:
            yield workers or default_communicator()

    # --- fit, evaluate, predict -----------------------------------------------------------------

    @_with_arguments_of_keras
    def fit(self, given: dict[str, Any]) -> Any:
        """Train on all replicas, as Keras' `Model.fit` does on one device. Every replica must call.

        Args:
            x: data; every replica passes the same.
            batch_size: size of the global batch, which the replicas share.

        The other arguments are those of Keras.
        """
        if self.elastic is None:
            return self._fit(given)
        return self.elastic.fit(self._model, given, self._fit)

    def _fit(self, given: dict[str, Any]) -> Any:
        with self._all_replicas():
            split, whole = given.pop("validation_split"), given["validation_data"]
            if split and whole is None:
                arrays = tuple(given[name] for name in _ARRAYS)
                arrays, whole = train_validation_split(arrays, validation_split=split)
                given.update(zip(_ARRAYS, arrays, strict=True))
            if whole is not None:
                whole = keras.utils.unpack_x_y_sample_weight(whole)
                validation = dict(zip(_ARRAYS, whole, strict=True))
                validation["batch_size"] = given["validation_batch_size"] or given["batch_size"]
                given["validation_data"] = self._parts(validation, given["validation_steps"])
            del given["validation_batch_size"]
            history = self._pass("fit", given, given["steps_per_epoch"])
            gather_states(self._model)
            return history

    @_with_arguments_of_keras
    def evaluate(self, given: dict[str, Any]) -> Any:
        """Evaluate on all replicas, as Keras' `Model.evaluate`. Every replica must call."""
        with self._all_replicas():
            return self._pass("evaluate", given, given["steps"])

    @_with_arguments_of_keras
    def predict(self, given: dict[str, Any]) -> Any:
        """Predict on all replicas; each returns all predictions. Every replica must call."""
        with self._all_replicas():
            return self._pass("predict", given, given["steps"])

    def _pass(self, call: str, given: dict[str, Any], steps: int | None) -> Any:
        """Call one of Keras' methods with this replica's parts and callbacks."""
        data = self._parts(given, steps)
        if not isinstance(given["callbacks"], ReplicaCallbacks):  # those of fit, in its evaluation
            given["callbacks"] = ReplicaCallbacks(
                given["callbacks"],
                self,
                add_history=call == "fit",
                verbose=given["verbose"],
                epochs=given.get("epochs", 1),
                steps=steps or data.num_batches,
                model=self._model,
            )
        return self._plain(call)(data, **given)

    @_with_arguments_of_keras
    def train_on_batch(self, given: dict[str, Any]) -> Any:
        """Train on one global batch. Every replica must call, with the whole batch."""
        class_weight = given.pop("class_weight")
        if class_weight is not None:
            if given["sample_weight"] is not None:
                raise ValueError("train_on_batch: expected sample_weight or class_weight, got both")
            given["sample_weight"] = class_weight_to_sample_weights(given["y"], class_weight)
        return self._on_batch("train_on_batch", given)

    @_with_arguments_of_keras
    def test_on_batch(self, given: dict[str, Any]) -> Any:
        """Evaluate one global batch. Every replica must call, with the whole batch."""
        return self._on_batch("test_on_batch", given)

    @_with_arguments_of_keras
    def predict_on_batch(self, given: dict[str, Any]) -> Any:
        """Predict for one global batch. Every replica must call, with the whole batch."""
        return self._on_batch("predict_on_batch", given)

    def _on_batch(self, call: str, given: dict[str, Any]) -> Any:
        batch = {name: given.pop(name) for name in _ARRAYS if name in given}
        with self._all_replicas():
            self._reads_logs = True
            try:
                self.steps.begin_pass()
                part, self.steps.examples = cut_batch(batch, self.strategy._input_layout())
                return self._plain(call)(**part, **given)
            finally:
                self._reads_logs = False
                self.steps.examples = None

    @contextlib.contextmanager
    def _all_replicas(self) -> Iterator[None]:
        """Return a context manager around a call that all replicas make."""
        if state.replica is not None:
            raise RuntimeError("a Keras model's fit, evaluate or predict was called inside run")
        if keras.distribution.distribution() is not None:
            raise UnsupportedError(
                f"keras.distribution.set_distribution was given a "
                f"{type(keras.distribution.distribution()).__name__}, which would divide the data "
                "of the model a second time; use a strategy or Keras' distribution"
            )
        self.strategy.adopt_new()
        with self.strategy.together():
            yield

    def _parts(self, given: dict[str, Any], steps: int | None) -> Any:
        """Take the data out of arguments; return an adapter that yields this replica's parts."""
        names = (*_ARRAYS, "batch_size", "class_weight", "shuffle")
        data = {name: given.pop(name) for name in names if name in given}
        x = data["x"]
        if isinstance(x, (PartAdapter, DistributedAdapter)):
            return x
        if isinstance(x, DistributedDataset):
            for name in ("y", "sample_weight", "batch_size", "class_weight"):
                value = data.get(name)
                if value is not None:
                    raise ValueError(
                        f"{name} must not be given with a distributed dataset, whose batches have "
                        f"their own; got {type(value).__name__}"
                    )
            return DistributedAdapter(x, self.steps)
        return PartAdapter(get_data_adapter(**data, steps_per_epoch=steps), self.steps)

    def _initialize_ddp(self) -> None:
        """Do not wrap the model in DDP, as Keras 3.16 does where torch has a process group."""

    # --- steps ----------------------------------------------------------------------------------

    def _make(self, kind: str, force: bool = False) -> Any:
        """Make the function that trains on, evaluates or predicts for one batch."""
        require_parts(self._model)
        self._plain(f"make_{kind}_function")(force)
        self.steps.prepare()
        function = getattr(self._model, f"{kind}_function")
        run = self.steps.predict if kind == "predict" else self._train_or_test
        if getattr(function, "func", None) != run:
            function = functools.partial(run, function)
            setattr(self._model, f"{kind}_function", function)
        return function

    make_train_function = functools.partialmethod(_make, "train")
    make_test_function = functools.partialmethod(_make, "test")
    make_predict_function = functools.partialmethod(_make, "predict")

    def _train_or_test(self, function: Callable[..., Any], data: Any) -> Any:
        logs = self.steps.train_or_test(function, data)
        return self.global_logs(logs) if self._reads_logs else logs

    # --- results of all replicas ----------------------------------------------------------------

    def get_metrics_result(self) -> Any:
        """Return the metrics of all replicas; in `run` those of this replica.

        Outside `run` every replica must call.
        """
        plain = results_of_metrics(self._model)
        if state.replica is not None:
            return plain()
        with self.communicator() as workers, combined(self._model.metrics, workers):
            return plain()

    def _get_metrics_result_or_logs(self, logs: Any) -> Any:
        """Return the metrics of all replicas, or the logs of a step that has logs of its own."""
        return self._plain("_get_metrics_result_or_logs")(self.global_logs(logs))

    def global_logs(self, logs: Any) -> Any:
        """Return the logs of a step over all replicas. Every replica must call."""
        if not isinstance(logs, dict) or not logs:
            return logs
        plain = results_of_metrics(self._model)
        with self.communicator() as workers:
            return global_logs(logs, self._model.metrics, plain, workers, self.steps.last_examples)

    # --- saving ---------------------------------------------------------------------------------

    def save(self, filepath: Any, overwrite: bool = True, **options: Any) -> Any:
        """Save the model as Keras does; replicas may save to one path at the same time.

        With a sharded optimizer every replica must call, here and in `save_weights`.
        """
        return self._save("save", filepath, overwrite, **options)

    def save_weights(self, filepath: Any, overwrite: bool = True, **options: Any) -> Any:
        """Save the weights as Keras does; replicas may save to one path at the same time."""
        return self._save("save_weights", filepath, overwrite, **options)

    def _save(self, call: str, filepath: Any, overwrite: bool, **options: Any) -> Any:
        plain = self._plain(call)
        is_file = isinstance(filepath, (str, Path)) and not options.get("max_shard_size")
        if not is_file or not overwrite or not os.path.isdir(Path(filepath).parent):
            return plain(filepath, overwrite=overwrite, **options)
        path = Path(filepath)
        own = path.with_name(f".{os.getpid()}-{path.name}")
        try:
            result = plain(own, overwrite=True, **options)
            os.replace(own, path)
        finally:
            own.unlink(missing_ok=True)
        return result


def accept_distributed_datasets(model: Any, strategy: ReplicatedStrategy) -> None:
    """Let the model of one replica, which Keras itself trains, take datasets of the strategy."""
    ref = weakref.ref(model)
    steps = ReplicaSteps(ref, strategy)  # takes note of batches, and is not called

    def adapted(data: Any) -> Any:
        if isinstance(data, DistributedDataset):
            return DistributedAdapter(data, steps)
        return data

    for name in ("fit", "evaluate", "predict"):
        plain = getattr(type(model), name)

        @functools.wraps(plain)
        def call(x: Any = None, *args: Any, _plain: Any = plain, **options: Any) -> Any:
            if options.get("validation_data") is not None:
                options["validation_data"] = adapted(options["validation_data"])
            return _plain(ref(), adapted(x), *args, **options)

        object.__setattr__(model, name, call)
