"""Evaluates the checkpoints of a Keras model that is trained elsewhere."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import keras

from fastdist.checkpoints.agreement import Ranks, broadcast_result
from fastdist.checkpoints.manager import CheckpointManager, checkpoints_after, number_of
from fastdist.keras.fit_state import KerasCheckpoint

T = TypeVar("T")


class SidecarEvaluator:
    """Evaluates each checkpoint that `fd.keras.BackupAndRestore` makes in another job.

    For the evaluator task of a cluster, with the model that is trained there. The job keeps its
    backups (`delete_checkpoint=False`). The best checkpoint is kept in the folder "best" of the
    directory (tf.keras.utils.SidecarEvaluator).

    Args:
        model: the compiled and built model.
        data: the `validation_data` of `fit`: `(x, y)`, a DataLoader, ...
        directory: the backups' directory; it may not exist yet.
        steps: number of batches per evaluation; None: all.
        callbacks: callbacks for `evaluate`, such as TensorBoard. The optimizer's `iterations` is
            the step.
        monitor: name of the result that tells which checkpoint is the best.
        mode: "min" if less is better, "max" if more is.
        timeout_s: seconds to wait for a new checkpoint; None: until training has ended.

    Raises:
        ValueError: the model has no weights yet, or mode is another string.

    Examples:
        >>> import os, tempfile
        >>> os.environ["KERAS_BACKEND"] = "torch"
        >>> import fastdist as fd, keras, numpy as np
        >>> model = keras.Sequential([keras.layers.Dense(1)])
        >>> model.compile("sgd", "mse")
        >>> x = np.ones((8, 2))
        >>> with tempfile.TemporaryDirectory() as folder:  # first the job, then the evaluator
        ...     backup = fd.keras.BackupAndRestore(folder, delete_checkpoint=False)
        ...     history = model.fit(x, x.sum(1), callbacks=[backup], verbose=0)
        ...     results = fd.keras.SidecarEvaluator(model, (x, x.sum(1)), folder).start()
        >>> sorted(results)
        ['loss']
    """

    def __init__(
        self,
        model: Any,
        data: Any,
        directory: str | Path,
        steps: int | None = None,
        callbacks: Sequence[Any] | None = None,
        *,
        monitor: str = "loss",
        mode: Literal["min", "max"] = "min",
        timeout_s: float | None = None,
    ) -> None:
        if not model.built:
            raise ValueError(
                f"the model {model.name!r} has no weights yet: begin it with keras.Input, or call "
                "model.build(shape)"
            )
        if mode not in ("min", "max"):
            raise ValueError(f"mode must be 'min' or 'max', got {mode!r}")
        self._model = model
        self._data = keras.utils.unpack_x_y_sample_weight(data)
        self._directory = Path(directory).absolute()
        self._steps = steps
        self._callbacks = list(callbacks or [])
        self._monitor = monitor
        self._sign = 1.0 if mode == "min" else -1.0
        self._timeout_s = timeout_s
        self._ranks = Ranks([model])

    def start(self) -> dict[str, float]:
        """Evaluate until training has ended. Every replica of the model must call.

        An evaluator that is started again continues after the best checkpoint.

        Returns:
            The results of the best checkpoint; empty if there was no checkpoint.

        Raises:
            ValueError: the checkpoints are of another model, or `monitor` is no result.
        """
        best = KerasCheckpoint(self._model, step=-1, results={})
        with CheckpointManager(self._directory / "best", max_to_keep=1) as manager:
            manager.restore(best)
            for path in checkpoints_after(
                best.step, self._directory, self._timeout_s, self._on_chief
            ):
                results = self._evaluate(path)
                if results is not None and self._is_better(results, best.results):
                    best.step, best.results = number_of(path), results
                    manager.save(best)
        found: dict[str, float] = best.results
        return found

    def _on_chief(self, call: Callable[[], T]) -> T:
        with self._ranks.communicator() as workers:
            return broadcast_result(workers, call)

    def _evaluate(self, path: Path) -> dict[str, float] | None:
        """Evaluate a checkpoint; None if the job has removed it meanwhile."""
        try:
            KerasCheckpoint(self._model).restore(path)
        except (OSError, ValueError):
            if self._on_chief(path.exists):
                raise
            return None
        model = self._model
        if model.optimizer is not None:
            model.optimizer.iterations.assign(number_of(path))
        x, y, sample_weight = self._data
        results: dict[str, float] = model.evaluate(
            x,
            y,
            sample_weight=sample_weight,
            steps=self._steps,
            callbacks=self._callbacks,
            verbose=0,
            return_dict=True,
        )
        if self._monitor not in results:
            raise ValueError(f"monitor must be one of {sorted(results)}, got {self._monitor!r}")
        return {name: float(value) for name, value in results.items()}

    def _is_better(self, results: dict[str, float], best: dict[str, float]) -> bool:
        if not best or math.isnan(best[self._monitor]):
            return True
        return self._sign * results[self._monitor] < self._sign * best[self._monitor]
