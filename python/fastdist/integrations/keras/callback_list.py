"""The list of callbacks of one replica, with the logs of all replicas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras

from fastdist.integrations.keras.callbacks import is_chief_only
from fastdist.integrations.keras.internals import is_default


class ReplicaCallbacks(keras.callbacks.CallbackList):  # type: ignore[misc]
    """Calls this replica's callbacks with logs of all replicas, and agrees when to stop.

    Args:
        callbacks: the user's callbacks, of which only the chief keeps those that write or draw.
        is_chief: True on replica 0.
        globalize: turns the logs of a step into those of all replicas; a collective.
        any_replica: tells of each condition whether it holds on any replica; a collective.
        agree: makes the attributes `stop_*` of the model equal on all replicas; a collective.
        share: gives all replicas what the chief's callbacks have restored; a collective.
        share_rate: gives all replicas the chief's learning rate; a collective.
        add_progbar: show a progress bar on the chief.
        options: the other arguments of Keras' CallbackList.
    """

    def __init__(
        self,
        callbacks: Any,
        *,
        is_chief: bool,
        globalize: Callable[[Any], Any],
        any_replica: Callable[[list[bool]], list[bool]],
        agree: Callable[[], None],
        share: Callable[[], None],
        share_rate: Callable[[], None],
        add_progbar: bool,
        **options: Any,
    ) -> None:
        if isinstance(callbacks, keras.callbacks.CallbackList):
            callbacks = callbacks.callbacks
        given = [c for c in keras.tree.flatten(callbacks or []) if c is not None]
        self._globalize = globalize
        self._agree = agree
        # Replicas may have different callbacks, and call the same collectives.
        self._reads_train, self._reads_test, shares = any_replica(
            [
                add_progbar or _has(given, "on_batch_end", "on_train_batch_end"),
                add_progbar or _has(given, "on_test_batch_end"),
                any(map(is_chief_only, given)),
            ]
        )
        self._share = share if shares else None
        self._share_rate = share_rate if shares else None
        own = given if is_chief else [c for c in given if not is_chief_only(c)]
        super().__init__(own, add_progbar=add_progbar and is_chief, **options)

    def on_train_begin(self, logs: Any = None) -> None:
        """Call the callbacks; then all replicas go on from what the chief's have restored."""
        super().on_train_begin(logs)
        if self._share is not None:
            self._share()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Call the callbacks with the logs of all replicas, if any reads them."""
        super().on_train_batch_end(batch, self._globalize(logs) if self._reads_train else logs)
        self._agree()

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        """Call the callbacks with the logs of all replicas, if any reads them."""
        super().on_test_batch_end(batch, self._globalize(logs) if self._reads_test else logs)
        self._agree()

    def on_predict_batch_end(self, batch: int, logs: Any = None) -> None:
        """Call the callbacks."""
        super().on_predict_batch_end(batch, logs)
        self._agree()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Call the callbacks; the chief's may have changed the learning rate."""
        super().on_epoch_end(epoch, logs)
        if self._share_rate is not None:
            self._share_rate()
        self._agree()


def _has(callbacks: list[Any], *methods: str) -> bool:
    return any(not is_default(getattr(c, method)) for c in callbacks for method in methods)
