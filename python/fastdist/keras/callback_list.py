"""The list of callbacks of one replica, with the logs of all replicas."""

from __future__ import annotations

import time
from functools import partialmethod
from typing import Any

import keras
import numpy as np

from fastdist.keras.callbacks import is_chief_only
from fastdist.keras.internals import is_default
from fastdist.keras.optimizers import gather_states
from fastdist.training.modules import broadcast_state

_STOPS = ("stop_training", "stop_evaluating", "stop_predicting")
_DRAWN_EVERY_S = 0.05  # Keras' progress bar draws at most this often


class ReplicaCallbacks(keras.callbacks.CallbackList):  # type: ignore[misc]
    """Calls this replica's callbacks with logs of all replicas, and agrees when to stop.

    Args:
        callbacks: the user's callbacks; only the chief keeps those that write or draw.
        trainer: the model's ReplicatedTrainer.
        add_history: True in `fit`, whose bar shows no validation steps.
    """

    def __init__(
        self,
        callbacks: Any,
        trainer: Any,
        *,
        add_history: bool,
        verbose: Any,
        **options: Any,
    ) -> None:
        given = flat(callbacks)
        self._trainer = trainer
        is_chief = trainer.steps.workers().rank == 0
        self._has_bar = is_chief and verbose in ("auto", 1)
        self._drawn_at = 0.0
        self._is_due = False  # True if the bar is drawn after this step
        # Replicas may have different callbacks, and call the same collectives.
        chiefs = list(filter(is_chief_only, given))
        wanted = self._any_replica(
            overrides(given, "on_batch_end", "on_train_batch_end"),
            overrides(given, "on_test_batch_end"),
            self._has_bar,
            bool(chiefs),
            any(_saves_after(each, options["model"]) for each in chiefs),
        )
        self._reads_train, self._reads_test, self._draws_train = wanted[:3]
        self._draws_test = self._draws_train and not add_history
        self._shares, self._saves_next = wanted[3:]  # after the next step
        self._chiefs = chiefs if is_chief else []
        own = given if is_chief else [c for c in given if not is_chief_only(c)]
        super().__init__(
            own,
            add_progbar=is_chief and verbose != 0,
            add_history=add_history,
            verbose=verbose,
            **options,
        )

    def _configure_async_dispatch(self, callbacks: Any) -> None:
        """Call callbacks in this thread: in another, deadlocks of replicas would go unnoticed."""

    def on_train_begin(self, logs: Any = None) -> None:
        """Call the callbacks; then share what the chief's callbacks have restored."""
        if self._shares:
            gather_states(self.model)
        super().on_train_begin(logs)
        if self._shares:
            self._share_chief()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Call the callbacks; a new bar is drawn after the first step."""
        self._is_due = self._draws_train
        super().on_epoch_begin(epoch, logs)

    def on_test_begin(self, logs: Any = None) -> None:
        """Call the callbacks; a new bar is drawn after the first step."""
        self._is_due = self._draws_test
        super().on_test_begin(logs)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Call the callbacks with the logs of all replicas, if any reads them."""
        if self._saves_next:
            gather_states(self.model)
        super().on_train_batch_end(batch, self._read(logs, self._reads_train))
        self._end_step(self._draws_train)

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        """Call the callbacks with the logs of all replicas, if any reads them."""
        super().on_test_batch_end(batch, self._read(logs, self._reads_test))
        self._end_step(self._draws_test)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Call the callbacks; the chief's may save, and may have changed the learning rate."""
        if self._shares:
            gather_states(self.model)
        super().on_epoch_end(epoch, logs)
        if self._shares:
            self._share_rate()
        self._agree()

    def _end(self, call: str, *args: Any, **options: Any) -> None:
        """Call the callbacks, and wait until the callbacks of all replicas have ended."""
        getattr(super(), call)(*args, **options)
        self._agree()

    on_predict_batch_end = partialmethod(_end, "on_predict_batch_end")
    on_train_end = partialmethod(_end, "on_train_end")
    on_test_end = partialmethod(_end, "on_test_end")
    on_predict_end = partialmethod(_end, "on_predict_end")

    def _read(self, logs: Any, are_read: bool) -> Any:
        """Return the logs of all replicas, if a callback reads them or the bar is due."""
        if not (are_read or self._is_due):
            return {}
        self._drawn_at = time.monotonic()
        return self._trainer.global_logs(logs)

    def _end_step(self, draws: bool) -> None:
        """Agree when to stop, and whether the bar is drawn after the next step."""
        wait_s = time.monotonic() - self._drawn_at
        is_due = draws and self._has_bar and wait_s >= _DRAWN_EVERY_S
        saves = any(_saves_after(each, self.model) for each in self._chiefs)
        self._is_due, self._saves_next = self._agree(is_due, saves)

    # Collectives: every replica must call.

    def _any_replica(self, *conditions: bool) -> list[bool]:
        """Return, for each condition, True if it holds on any replica."""
        found = np.array(conditions, np.uint8)
        with self._trainer.communicator() as workers:
            workers.all_reduce(found, "max")
        return [bool(one) for one in found]

    def _agree(self, *conditions: bool) -> list[bool]:
        """Stop all replicas if any wants to stop; return True for conditions that hold on any."""
        wanted = [bool(getattr(self.model, name, False)) for name in _STOPS]
        found = self._any_replica(*wanted, *conditions)
        for name, is_wanted in zip(_STOPS, found, strict=False):
            if is_wanted:
                setattr(self.model, name, True)
        return found[len(_STOPS) :]

    def _share_chief(self) -> None:
        """Give all replicas what the chief's callbacks have restored."""
        model = self.model
        with self._trainer.communicator() as workers:
            model._initial_epoch = workers.broadcast_object(model._initial_epoch)
            optimizer = getattr(model, "optimizer", None)
            variables = [*model.variables, *(optimizer.variables if optimizer else [])]
            broadcast_state(workers, [variable.value for variable in variables])

    def _share_rate(self) -> None:
        rate = getattr(getattr(self.model, "optimizer", None), "_learning_rate", None)
        if isinstance(rate, keras.Variable):
            with self._trainer.communicator() as workers:
                broadcast_state(workers, [rate.value])


def flat(callbacks: Any) -> list[Any]:
    """Return the callbacks in what `fit` was given: a CallbackList, a callback, a list, or None."""
    if isinstance(callbacks, keras.callbacks.CallbackList):
        callbacks = callbacks.callbacks
    return [callback for callback in keras.tree.flatten(callbacks or []) if callback is not None]


def _saves_after(callback: Any, model: Any) -> bool:
    """Return True if a callback of Keras saves after the next call of the step function."""
    every = getattr(callback, "save_freq", None)
    seen = getattr(callback, "_batches_seen_since_last_saving", every)
    return isinstance(every, int) and seen + model.steps_per_execution >= every


def overrides(callbacks: list[Any], *methods: str) -> bool:
    """Return True if a callback has a method of its own in place of one of Keras' empty ones."""
    return any(not is_default(getattr(c, method)) for c in callbacks for method in methods)
