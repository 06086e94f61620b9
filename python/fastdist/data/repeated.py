"""Warns of a dataset that is made anew for every epoch: all epochs have the order of the first."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Hashable
from typing import Any

from torch.utils.data import DataLoader

from fastdist.data.distributed import DistributedDataset
from fastdist.data.pipelines import ArrayPipeline

_Key = tuple[Hashable, ...]


class ShuffledDatasets:
    """The shuffled datasets that one strategy has made."""

    def __init__(self) -> None:
        # For equal data and arguments: finished epochs of the dataset that was made last.
        self._of_arrays: dict[_Key, int] = {}
        self._of_source: weakref.WeakKeyDictionary[Any, dict[_Key, int]] = (
            weakref.WeakKeyDictionary()
        )

    def note(self, dataset: DistributedDataset[Any], source: Any) -> None:
        """Note a dataset and its source; warn if the last one like it ended after one epoch."""
        key: _Key = dataset.settings
        if ("shuffle", True) not in key:
            return
        if isinstance(dataset.pipeline, ArrayPipeline):
            epochs, key = self._of_arrays, (dataset.pipeline.sampled_rows, *key)
        else:
            data = source.dataset if isinstance(source, DataLoader) else source
            try:
                epochs = self._of_source.setdefault(data, {})
            except TypeError:  # such as a list, which may be an equal one's copy
                return
        if epochs.get(key) == 1:
            warnings.warn(
                "distribute_dataset(shuffle=True) was called again with the same data and seed, "
                "after one epoch: this epoch has the order of the one before. Make the dataset "
                "once, before the loop over epochs, of which each then has an order of its own, or "
                "give seed=epoch",
                stacklevel=3,  # the line that calls strategy.distribute_dataset
            )
        epochs[key] = 0

        def end_epoch() -> None:
            epochs[key] += 1

        dataset.end_epoch = end_epoch
