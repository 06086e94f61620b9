"""Callbacks on replicas: writers act on the chief, all others on every replica."""

from __future__ import annotations

from typing import Any

_CHIEF_ONLY = "_fastdist_chief_only"


def chief_only(callback: Any) -> Any:
    """Make a Keras callback act on the chief alone, and return it.

    Keras' own callbacks that write or draw act on the chief without this. Such a callback must not
    call `fit`, `evaluate`, `predict` or `get_metrics_result` of the model, which all replicas call
    together. What it changes in `on_train_begin` (weights, the optimizer's state, the epoch to
    begin with) and `stop_training` reach all replicas.

    Args:
        callback: a `keras.callbacks.Callback`.

    Examples:
        >>> import os
        >>> os.environ["KERAS_BACKEND"] = "torch"
        >>> import fastdist as fd, keras
        >>> writes = fd.keras.chief_only(keras.callbacks.LambdaCallback(on_epoch_end=print))
    """
    setattr(callback, _CHIEF_ONLY, True)
    return callback


def is_chief_only(callback: Any) -> bool:
    """Return True for a callback that acts on the chief alone."""
    from keras import callbacks

    writers = (
        callbacks.BackupAndRestore,
        callbacks.CSVLogger,
        callbacks.ModelCheckpoint,
        callbacks.ProgbarLogger,
        callbacks.RemoteMonitor,
        callbacks.TensorBoard,
    )
    return getattr(callback, _CHIEF_ONLY, False) or isinstance(callback, writers)
