"""Backs up a running `fit`, and continues from the backup with the next step.

A backup is a checkpoint that is taken between two steps: when Keras tells the callbacks that a
step begins. The restored `fit` repeats the order of the interrupted epoch, skips the batches of the
finished steps, and restores everything at the same moment.

In an elastic job `fit` is called again after a loss, and goes on from the last commit.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import keras

from fastdist.checkpoints import Checkpoint, CheckpointManager, PreemptionCheckpointHandler
from fastdist.checkpoints.elastic import Elastic
from fastdist.errors import UnsupportedError
from fastdist.keras.callback_list import flat
from fastdist.keras.callback_states import CallbackAttributes
from fastdist.keras.fit_state import FitState, KerasCheckpoint
from fastdist.keras.internals import running_fit
from fastdist.keras.methods import trainer_of
from fastdist.keras.optimizers import make_room
from fastdist.strategies.replicated import ReplicatedStrategy

_TO_KEEP = 2  # if the newest is damaged, the one before is used
_open: dict[Path, BackupAndRestore] = {}


class BackupAndRestore(keras.callbacks.Callback):  # type: ignore[misc]
    """Backs up `fit`, and lets `fit` continue when the program is started again.

    Every replica has one, among the callbacks of `fit`. A job that was killed ends with the same
    bits as one that was not (tf.keras.callbacks.BackupAndRestore). Under ParameterServerStrategy
    the servers back up each epoch: the model and the optimizer, not the callbacks' states.

    In an elastic job (`fastdist run --min`), `fit` goes on when ranks are lost or join: from the
    last copy of the same state in memory. The backups count only if all ranks are lost.

    Args:
        directory: the backups' directory; each program needs its own. The end of `fit` removes
            the backups.
        save_freq: "epoch", or a number of steps between two backups.
        delete_checkpoint: False to keep the backups. The last one holds the trained model; another
            `fit` with this directory and no more epochs does nothing.
        save_before_preemption: also back up and exit, as `fd.PreemptionCheckpointHandler` does, if
            a replica is told to end.
        commit_freq: number of steps between two copies in memory, in an elastic job. After a loss
            the steps since the last copy are repeated.

    Raises:
        ValueError: save_freq is another string, or less than 1; commit_freq is less than 1.

    Examples:
        >>> import os, tempfile
        >>> os.environ["KERAS_BACKEND"] = "torch"
        >>> import fastdist as fd, keras, numpy as np
        >>> model = keras.Sequential([keras.layers.Dense(1)])
        >>> model.compile("sgd", "mse")
        >>> x = np.ones((8, 2))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     backup = fd.keras.BackupAndRestore(f"{folder}/backup", save_freq=2)
        ...     history = model.fit(x, x.sum(1), epochs=3, callbacks=[backup], verbose=0)
        >>> len(history.history["loss"])
        3
    """

    def __init__(
        self,
        directory: str | Path,
        save_freq: Literal["epoch"] | int = "epoch",
        *,
        delete_checkpoint: bool = True,
        save_before_preemption: bool = False,
        commit_freq: int = 1,
    ) -> None:
        super().__init__()
        if save_freq != "epoch" and (type(save_freq) is not int or save_freq < 1):
            raise ValueError(f"save_freq must be 'epoch' or a number of steps, got {save_freq!r}")
        if type(commit_freq) is not int or commit_freq < 1:
            raise ValueError(f"commit_freq must be a number of steps, got {commit_freq!r}")
        self._directory = Path(directory).absolute()
        self._save_freq = save_freq
        self._commit_freq = commit_freq
        self._elastic: ElasticFit | None = None
        self._deletes = delete_checkpoint
        self._handles_preemption = save_before_preemption
        self._manager = CheckpointManager(self._directory, max_to_keep=_TO_KEEP)
        self._handler: PreemptionCheckpointHandler | None = None
        self._fit: FitState | None = None
        self._checkpoint: KerasCheckpoint
        self._strategy: Any = None  # of parameter servers
        self._resumes = False  # True from the beginning of a restored fit to its first step

    def on_train_begin(self, logs: Any = None) -> None:
        """Restore the newest backup, if there is one."""
        if (before := _open.get(self._directory)) is not None:  # its fit has failed
            before.close()
        _open[self._directory] = self
        model = self.model
        trainer = trainer_of(model)
        model._initial_epoch = None
        has_servers = trainer is not None and trainer.strategy.has_servers
        self._strategy = trainer.strategy if has_servers else None
        if has_servers:
            self._restore_servers()
            return
        iterator, callbacks = running_fit(model)
        others = [c for c in callbacks if c is not self]
        self._fit = FitState(model, iterator, others, self.params)
        self._checkpoint = KerasCheckpoint(model, step=0, fit=self._fit)
        self._elastic = None if trainer is None else trainer.elastic
        try:
            if self._elastic is None:
                self._manager.restore(self._checkpoint)
            else:
                attributes = CallbackAttributes(others)
                self._elastic.join(self._checkpoint, self._manager)
                if not self._fit.position.has_begun:
                    attributes.restore()  # their `on_train_begin` is due
        except BaseException:
            self.close()
            raise
        self._resumes = self._fit.position.resume()
        if self._resumes:
            model._initial_epoch = self._fit.position.epoch
        if self._handles_preemption:
            self._handler = PreemptionCheckpointHandler(self._manager, self._checkpoint)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Note the epoch."""
        if self._fit is not None:
            self._fit.position.epoch = epoch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Back up the values on parameter servers."""
        if self._strategy is not None:
            self._strategy.save(self._directory, {"epoch": epoch + 1})

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Back up if a backup is due; in a restored fit, first restore what has changed since."""
        if self._fit is None:  # on servers
            return
        if self._resumes:
            # Keras has reset metrics and called callbacks as if an epoch began.
            self._resumes = False
            self._restore()
        else:
            self._fit.position.note_step(batch)
            if self._elastic is not None and self._checkpoint.step % self._commit_freq == 0:
                self._elastic.commit()
            steps = self._checkpoint.step
            is_due = batch == 0 if self._save_freq == "epoch" else steps % self._save_freq == 0
            if is_due and steps > 0:
                self._manager.save(self._checkpoint, async_op=True)
        if self._handler is not None:
            self._handler.save_if_preempted()
        self._checkpoint.step += 1  # this step is not in the backup of this moment

    def on_train_end(self, logs: Any = None) -> None:
        """Remove the backups, or keep one of the end."""
        if self._fit is None:  # on servers
            if self._deletes:
                self._strategy.remove(self._directory)
        else:
            if self._resumes:  # nothing was left to do
                self._restore()
            elif not self._deletes:
                self._fit.position.note_end(self.params["epochs"])
                self._manager.save(self._checkpoint)
            if self._deletes:
                self._manager.remove_all()
            self._manager.end()
        self.model._initial_epoch = None
        self.close()

    def close(self) -> None:
        """Let other jobs use the directory, and restore the signals' handlers.

        The end of `fit` does so too; after a failed `fit`, the next `fit` with this directory does.
        """
        if _open.get(self._directory) is self:
            del _open[self._directory]
        if self._handler is not None:
            self._handler.close()
            self._handler = None
        if self._fit is not None:
            self._fit.position.release()
            self._fit = None
        self._manager.release()

    def _restore(self) -> None:
        if self._elastic is None:
            self._manager.restore(self._checkpoint)
        else:
            self._elastic.restore()

    def _restore_servers(self) -> None:
        if self._save_freq != "epoch" or self._handles_preemption:
            raise UnsupportedError(
                "fd.keras.BackupAndRestore under ParameterServerStrategy backs up each epoch; "
                f"got save_freq={self._save_freq!r} and save_before_preemption="
                f"{self._handles_preemption}"
            )
        with contextlib.suppress(FileNotFoundError):  # there is no backup yet
            self.model._initial_epoch = self._strategy.restore(self._directory)["epoch"]


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
        others = [each for each in callbacks if not isinstance(each, BackupAndRestore)]
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
    if not any(isinstance(callback, BackupAndRestore) for callback in callbacks):
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
