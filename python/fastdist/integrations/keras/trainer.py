"""The trainer of one Keras model: its fit, evaluate and predict become those of all replicas.

The model's methods are replaced on the instance; the class stays as Keras made it. Keras' own
methods run on every replica, with the replica's part of each global batch, in `strategy.run`.
"""

from __future__ import annotations

import contextlib
import weakref
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import torch

from fastdist.collectives.communicator import Communicator
from fastdist.data import DistributedDataset
from fastdist.integrations.keras.callback_list import ReplicaCallbacks
from fastdist.integrations.keras.internals import (
    DataAdapter,
    class_weight_to_sample_weights,
    get_data_adapter,
    train_validation_split,
    unpack_x_y_sample_weight,
)
from fastdist.integrations.keras.layers import separate_random_numbers
from fastdist.integrations.keras.losses import share_losses
from fastdist.integrations.keras.metrics import combined, unchanged
from fastdist.integrations.keras.parts import (
    Cutter,
    DistributedAdapter,
    PartAdapter,
    share_random_state,
)
from fastdist.replicas.context import state
from fastdist.replicas.per_replica import PerReplica
from fastdist.strategies.replicated import ReplicatedStrategy
from fastdist.training.modules import broadcast_state

_STOPS = ("stop_training", "stop_evaluating", "stop_predicting")


class ReplicatedTrainer:
    """Replaces the training methods of a Keras model.

    Args:
        model: the model; it keeps this trainer alive, not the other way round.
        strategy: a strategy of several replicas, in whose scope the model was made.
        adopt: makes the strategy adopt what was made in its scope so far, if the scope is open.
    """

    def __init__(self, model: Any, strategy: ReplicatedStrategy, adopt: Callable[[], None]) -> None:
        self._ref = weakref.ref(model)
        self._strategy = strategy
        self._adopt = adopt
        self._layout = strategy._input_layout()
        self._cut = Cutter(self._layout)
        self._examples: tuple[int, ...] | None = None  # of the batch that the next step gets
        self._result: Any = None  # of the last step
        self._last_examples: tuple[int, ...] | None = None  # of the last step
        self._reads_logs = False  # True in calls for one batch, whose logs are read at once
        self._seeds = torch.Generator()  # of the steps
        self._seeded_from = -1
        for name in (
            "fit",
            "evaluate",
            "predict",
            "train_on_batch",
            "test_on_batch",
            "predict_on_batch",
            "make_train_function",
            "make_test_function",
            "make_predict_function",
            "get_metrics_result",
            "_get_metrics_result_or_logs",
        ):
            object.__setattr__(model, name, getattr(self, name))

    @property
    def _model(self) -> Any:
        return self._ref()

    def _plain(self, name: str) -> Callable[..., Any]:
        """Return the model's own method."""
        method: Callable[..., Any] = getattr(type(self._model), name).__get__(self._model)
        return method

    def _workers(self) -> Communicator:
        workers = self._strategy._workers
        assert workers is not None
        return workers

    # --- fit, evaluate, predict -----------------------------------------------------------------

    def fit(
        self,
        x: Any = None,
        y: Any = None,
        batch_size: int | None = None,
        epochs: int = 1,
        verbose: Any = "auto",
        callbacks: Any = None,
        validation_split: float = 0.0,
        validation_data: Any = None,
        shuffle: Any = True,
        class_weight: Any = None,
        sample_weight: Any = None,
        initial_epoch: int = 0,
        steps_per_epoch: int | None = None,
        validation_steps: int | None = None,
        validation_batch_size: int | None = None,
        validation_freq: Any = 1,
    ) -> Any:
        """Train on all replicas, as Keras' `Model.fit` does on one device. Every replica must call.

        Args:
            x: data; every replica passes the same.
            batch_size: size of the global batch, which the replicas share.

        The other arguments are those of Keras.
        """
        with self._all_replicas():
            if validation_split and validation_data is None:
                (x, y, sample_weight), validation_data = train_validation_split(
                    (x, y, sample_weight), validation_split=validation_split
                )
            data = self._parts(
                x, y, sample_weight, batch_size, steps_per_epoch, shuffle, class_weight
            )
            if validation_data is not None:
                val_x, val_y, val_weight = unpack_x_y_sample_weight(validation_data)
                size = validation_batch_size or batch_size
                validation_data = self._parts(val_x, val_y, val_weight, size, validation_steps)
            return self._plain("fit")(
                data,
                epochs=epochs,
                verbose=verbose,
                callbacks=self._callbacks(
                    callbacks, verbose, data, epochs, steps_per_epoch, add_history=True
                ),
                validation_data=validation_data,
                initial_epoch=initial_epoch,
                steps_per_epoch=steps_per_epoch,
                validation_steps=validation_steps,
                validation_freq=validation_freq,
            )

    def evaluate(
        self,
        x: Any = None,
        y: Any = None,
        batch_size: int | None = None,
        verbose: Any = "auto",
        sample_weight: Any = None,
        steps: int | None = None,
        callbacks: Any = None,
        return_dict: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Evaluate on all replicas, as Keras' `Model.evaluate`. Every replica must call."""
        with self._all_replicas():
            data = self._parts(x, y, sample_weight, batch_size, steps)
            return self._plain("evaluate")(
                data,
                verbose=verbose,
                steps=steps,
                callbacks=self._callbacks(callbacks, verbose, data, 1, steps),
                return_dict=return_dict,
                **kwargs,
            )

    def predict(
        self,
        x: Any,
        batch_size: int | None = None,
        verbose: Any = "auto",
        steps: int | None = None,
        callbacks: Any = None,
    ) -> Any:
        """Predict on all replicas; each returns all predictions. Every replica must call."""
        with self._all_replicas():
            data = self._parts(x, None, None, batch_size, steps)
            return self._plain("predict")(
                data,
                verbose=verbose,
                steps=steps,
                callbacks=self._callbacks(callbacks, verbose, data, 1, steps),
            )

    def train_on_batch(
        self,
        x: Any,
        y: Any = None,
        sample_weight: Any = None,
        class_weight: Any = None,
        return_dict: bool = False,
    ) -> Any:
        """Train on one global batch. Every replica must call, with the whole batch."""
        if class_weight is not None:
            if sample_weight is not None:
                raise ValueError("train_on_batch: expected sample_weight or class_weight, got both")
            sample_weight = class_weight_to_sample_weights(y, class_weight)
        return self._on_batch("train_on_batch", (x, y, sample_weight), return_dict=return_dict)

    def test_on_batch(
        self, x: Any, y: Any = None, sample_weight: Any = None, return_dict: bool = False
    ) -> Any:
        """Evaluate one global batch. Every replica must call, with the whole batch."""
        return self._on_batch("test_on_batch", (x, y, sample_weight), return_dict=return_dict)

    def predict_on_batch(self, x: Any) -> Any:
        """Predict for one global batch. Every replica must call, with the whole batch."""
        return self._on_batch("predict_on_batch", (x,))

    def _on_batch(self, call: str, batch: tuple[Any, ...], **options: Any) -> Any:
        with self._all_replicas():
            self._reads_logs = True
            try:
                self._begin_pass()
                part, self._examples = self._cut.batch(batch)
                return self._plain(call)(*part, **options)
            finally:
                self._reads_logs = False
                self._examples = None

    @contextlib.contextmanager
    def _all_replicas(self) -> Iterator[None]:
        """A context manager around a call that all replicas make."""
        if state.replica is not None:
            raise RuntimeError("a Keras model's fit, evaluate or predict was called inside run")
        self._adopt()
        with self._strategy.together():
            yield

    def _begin_pass(self) -> None:
        """Give all replicas the chief's random state, and derive the seeds of steps from it."""
        share_random_state(self._workers())
        found = zlib.crc32(torch.get_rng_state().numpy().data)
        if found != self._seeded_from:
            self._seeded_from = found
            self._seeds.manual_seed(found)

    def _parts(
        self,
        x: Any,
        y: Any,
        sample_weight: Any,
        batch_size: int | None,
        steps: int | None,
        shuffle: Any = False,
        class_weight: Any = None,
    ) -> Any:
        """Return a data adapter that yields this replica's parts."""
        if isinstance(x, (PartAdapter, DistributedAdapter)):
            return x
        if isinstance(x, DistributedDataset):
            for name, value in [
                ("y", y),
                ("sample_weight", sample_weight),
                ("batch_size", batch_size),
                ("class_weight", class_weight),
            ]:
                if value is not None:
                    raise ValueError(
                        f"{name} must not be given with a distributed dataset, whose batches have "
                        f"their own; got {type(value).__name__}"
                    )
            return DistributedAdapter(x, self._layout, self._note)
        whole = get_data_adapter(
            x=x,
            y=y,
            sample_weight=sample_weight,
            batch_size=batch_size,
            steps_per_epoch=steps,
            shuffle=shuffle,
            class_weight=class_weight,
        )
        return PartAdapter(whole, self._layout, self._workers, self._begin_pass, self._note)

    def _note(self, examples: tuple[int, ...]) -> None:
        self._examples = examples

    def _callbacks(
        self,
        callbacks: Any,
        verbose: Any,
        data: DataAdapter,
        epochs: int,
        steps: int | None,
        add_history: bool = False,
    ) -> ReplicaCallbacks:
        if isinstance(callbacks, ReplicaCallbacks):  # those of fit, in its evaluation
            return callbacks
        return ReplicaCallbacks(
            callbacks,
            is_chief=self._workers().rank == 0,
            globalize=self._global_logs,
            any_replica=self._any_replica,
            agree=self._agree_to_stop,
            share=self._share_chief,
            add_progbar=verbose != 0,
            add_history=add_history,
            verbose=verbose,
            epochs=epochs,
            steps=steps or data.num_batches,
            model=self._model,
        )

    # --- steps ----------------------------------------------------------------------------------

    def make_train_function(self, force: bool = False) -> Any:
        """Make the function that trains on one batch."""
        return self._make("train", self._train_or_test, force)

    def make_test_function(self, force: bool = False) -> Any:
        """Make the function that evaluates one batch."""
        return self._make("test", self._train_or_test, force)

    def make_predict_function(self, force: bool = False) -> Any:
        """Make the function that predicts for one batch."""
        return self._make("predict", self._predict, force)

    def _make(self, kind: str, run: Callable[..., Any], force: bool) -> Any:
        self._plain(f"make_{kind}_function")(force)
        self._prepare()
        function = getattr(self._model, f"{kind}_function")
        if not isinstance(function, _Step):
            function = _Step(function, run)
            setattr(self._model, f"{kind}_function", function)
        return function

    def _prepare(self) -> None:
        """Adapt what the model has built by now. Every replica must call."""
        model = self._model
        separate_random_numbers(model)
        share_losses(model)
        self._strategy.refresh()
        central, optimizer = self._strategy.central, model.optimizer
        if central is not None and optimizer is not None and "apply" not in optimizer.__dict__:
            apply, workers = optimizer.apply, self._workers
            if not optimizer.built:
                optimizer.build(model.trainable_variables)
            central.take_parameters(workers(), [v.value for v in optimizer.variables])

            def apply_once(grads: Any, trainable_variables: Any = None) -> None:
                central.step_once(workers(), lambda: apply(grads, trainable_variables))

            optimizer.apply = apply_once

    def _train_or_test(self, function: Callable[..., Any], data: Any) -> Any:
        examples, self._examples = self._examples, None
        self._last_examples = examples
        if examples is not None and not examples[self._workers().rank]:
            with unchanged(self._model.metrics):
                logs = self._run(function, data, examples)
        else:
            logs = self._run(function, data, examples)
        if self._reads_logs:
            return self._global_logs(logs)
        return logs

    def _predict(self, function: Callable[..., Any], data: Any) -> Any:
        examples, self._examples = self._examples, None
        outputs = self._run(function, data, examples)
        rank = self._workers().rank
        rows = slice(None) if examples is None else slice(examples[rank])
        return keras.tree.map_structure(
            lambda output: self._strategy.gather(output[rows], 0), outputs
        )

    def _run(
        self, function: Callable[..., Any], data: Any, examples: tuple[int, ...] | None
    ) -> Any:
        """Call a function in `strategy.run`; the process's random state stays as it was.

        So all replicas, and one device, shuffle alike after any number of steps.
        """
        generator = torch.default_generator
        before = generator.get_state()
        seed = torch.empty((), dtype=torch.int64).random_(generator=self._seeds)
        generator.manual_seed(int(seed))
        try:
            self._strategy.run(self._call, (PerReplica(((function, data),), examples),))
        finally:
            generator.set_state(before)
        result, self._result = self._result, None
        return result

    def _call(self, step: tuple[Callable[..., Any], Any]) -> None:
        function, data = step
        self._result = function(data)

    # --- what all replicas agree on -------------------------------------------------------------

    def get_metrics_result(self) -> Any:
        """Return the metrics of all replicas; in `run` those of this replica.

        Outside `run` every replica must call.
        """
        plain = self._plain("get_metrics_result")
        if state.replica is not None:
            return plain()
        with self._strategy.talking() as workers:
            assert workers is not None
            with combined(self._model.metrics, workers):
                return plain()

    def _get_metrics_result_or_logs(self, logs: Any) -> Any:
        """Return the metrics of all replicas, or the logs of a step that has logs of its own."""
        return self._plain("_get_metrics_result_or_logs")(self._global_logs(logs))

    def _global_logs(self, logs: Any) -> Any:
        """Return the logs of a step, of all replicas. Every replica must call.

        Results of the model's metrics are those of all replicas; other numbers become means,
        weighted by the examples of the last step.
        """
        if not isinstance(logs, dict) or not logs:
            return logs
        logs = dict(_flattened(logs))
        names = [name for name in sorted(logs) if _is_number(logs[name])]
        with self._strategy.talking() as workers:
            assert workers is not None
            examples = self._last_examples
            share = 1 / workers.world_size
            if examples is not None:
                share = examples[workers.rank] / max(1, sum(examples))
            numbers = [share * float(logs[name]) if share else 0.0 for name in names]
            means = torch.tensor(numbers, dtype=torch.float64)
            with combined(self._model.metrics, workers, [means]):
                results = self._plain("get_metrics_result")()
        logs |= zip(names, means.tolist(), strict=True)
        return {name: results.get(name, value) for name, value in logs.items()}

    def _any_replica(self, conditions: list[bool]) -> list[bool]:
        """Tell of each condition whether it holds on any replica. Every replica must call."""
        found = np.array(conditions, np.uint8)
        with self._strategy.talking() as workers:
            assert workers is not None
            workers.all_reduce(found, "max")
        return [bool(one) for one in found]

    def _agree_to_stop(self) -> None:
        """Stop all replicas after the same step if any wants to stop. Every replica must call."""
        model = self._model
        wanted = self._any_replica([bool(getattr(model, name, False)) for name in _STOPS])
        for name, is_wanted in zip(_STOPS, wanted, strict=True):
            if is_wanted:
                setattr(model, name, True)

    def _share_chief(self) -> None:
        """Give all replicas what the chief's callbacks have restored. Every replica must call."""
        model = self._model
        with self._strategy.talking() as workers:
            assert workers is not None
            model._initial_epoch = workers.broadcast_object(model._initial_epoch)
            variables = [*model.variables, *(model.optimizer.variables if model.optimizer else [])]
            broadcast_state(workers, [variable.value for variable in variables])


class _Step:
    """A function that Keras calls with a list of one batch."""

    def __init__(
        self,
        function: Callable[..., Any],
        run: Callable[[Callable[..., Any], Any], Any],
    ) -> None:
        self._function = function
        self._run = run

    def __call__(self, data: Any) -> Any:
        return self._run(self._function, data)


def _flattened(logs: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the values of logs; the results of metrics may be dicts, as Keras takes them."""
    for name, value in logs.items():
        if isinstance(value, dict):
            yield from _flattened(value)
        else:
            yield name, value


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) or getattr(value, "shape", None) == ()
