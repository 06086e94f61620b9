"""Warns of a dataset that is made anew for every epoch: all epochs have the order of the first."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Hashable
from typing import Any

_Key = tuple[Hashable, ...]


class ShuffledEpochs:
    """The epochs of a shuffled dataset.

    Args:
        finished: for equal data and arguments, the finished epochs of the dataset that was used
            last.
        key: the data and arguments.
    """

    def __init__(self, finished: dict[_Key, int], key: _Key) -> None:
        self._finished = finished
        self._key = key

    def begin(self) -> None:
        """Begin the first epoch; warn if the dataset before has ended after one epoch."""
        if self._finished.get(self._key) == 1:
            warnings.warn(
                "a dataset of distribute_dataset(shuffle=True) was made again with the same data "
                "and seed, after one epoch: this epoch has the order of the one before. Make the "
                "dataset once, before the loop over epochs, of which each then has an order of its "
                "own, or give seed=epoch",
                stacklevel=4,  # the line that iterates
            )
        self._finished[self._key] = 0

    def end(self) -> None:
        """Count an epoch that has ended."""
        self._finished[self._key] = self._finished.get(self._key, 0) + 1


class ShuffledDatasets:
    """The shuffled datasets that one strategy has made."""

    def __init__(self) -> None:
        self._of_arrays: dict[_Key, int] = {}
        self._of_source: weakref.WeakKeyDictionary[Any, dict[_Key, int]] = (
            weakref.WeakKeyDictionary()
        )

    def epochs(self, source: Any, sample: int | None, settings: _Key) -> ShuffledEpochs | None:
        """Return the epochs of a dataset; None if it cannot be told from others.

        Args:
            source: the source of examples.
            sample: a hash of some of its rows, if these are arrays; None: the object itself counts.
            settings: names and values of the dataset's arguments.
        """
        if sample is not None:
            return ShuffledEpochs(self._of_arrays, (sample, *settings))
        try:
            return ShuffledEpochs(self._of_source.setdefault(source, {}), settings)
        except TypeError:  # such as a list, which may be an equal one's copy
            return None
