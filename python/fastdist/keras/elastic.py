"""`fit` in an elastic job: after a loss it is called again, and goes on from the last commit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras

from fastdist.checkpoints.checkpoint import Checkpoint
from fastdist.checkpoints.elastic import Elastic
from fastdist.checkpoints.manager import CheckpointManager
from fastdist.errors import UnsupportedError
from fastdist.keras.callback_list import flat
from fastdist.keras.callback_states import CallbackAttributes
from fastdist.keras.optimizers import make_room
from fastdist.strategies.replicated import ReplicatedStrategy


class JoiningCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """A callback that calls `ElasticFit.join` when training begins."""


class BuiltError(BaseException):
    """Leaves a `fit` of this rank alone, which has built the model; not an Exception of Keras'."""


class ElasticFit(Elastic):
    """Calls `fit` again when ranks come or go.

    The first `fit`, of this rank alone, ends when training would begin: by then the model, its
    optimizer and its metrics are built, and other ranks wait for none of it.
    """

    def __init__(self, strategy: ReplicatedStrategy) -> None:
        super().__init__(strategy, Checkpoint(step=0))
        self._is_built = False

    def fit(self, model: Any, given: dict[str, Any], fit: Callable[[dict[str, Any]], Any]) -> Any:
        """Call `fit` with arguments of Keras until no rank is lost in it; return its result."""
        callbacks = flat(given["callbacks"])
        _require_repeatable(given["x"], callbacks)
        others = [each for each in callbacks if not isinstance(each, JoiningCallback)]
        attributes = CallbackAttributes(others)

        def attempt() -> Any:
            model._eval_epoch_iterator = None  # of an attempt that ended in its validation
            if self._commits:  # whose states are loaded
                make_room(model)
            attributes.restore()
            return fit(dict(given))

        if not self._is_built:
            try:
                attempt()
            except BuiltError:
                self._is_built = True
        return self._repeat(attempt)

    def join(self, checkpoint: Checkpoint, manager: CheckpointManager) -> None:
        """Take over the state of the ranks that have committed most; of a backup if none has.

        Every replica must call, when a `fit` begins.
        """
        if not self._is_built:
            raise BuiltError
        self._checkpoint, self._manager = checkpoint, manager
        self._take_over()

    def restore(self) -> None:
        """Restore the last commit."""
        self._restore(None)


def _require_repeatable(x: Any, callbacks: Sequence[Any]) -> None:
    """Check the arguments of a `fit` that may be called again in the middle of training."""
    if not any(isinstance(callback, JoiningCallback) for callback in callbacks):
        raise ValueError(
            "the ranks of this job come and go (fastdist run --min, --keep): fit needs "
            "fd.keras.BackupAndRestore among its callbacks to go on without a lost rank"
        )
    if isinstance(x, Iterator):
        raise UnsupportedError(
            f"fit was given a {type(x).__name__} in a job whose ranks come and go, which "
            "cannot be read again from an earlier batch; use arrays, a DataLoader, a PyDataset or "
            "strategy.distribute_dataset"
        )
