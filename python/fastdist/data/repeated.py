"""Warns of a dataset that is made anew for every epoch: all epochs have the order of the first."""

from __future__ import annotations

import warnings
from collections.abc import Hashable

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
