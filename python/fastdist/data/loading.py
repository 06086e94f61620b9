"""torch's DataLoader as the engine that fetches, in this process or in worker processes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader

from fastdist.data.drawing import epoch_seed


@dataclasses.dataclass(frozen=True, slots=True)
class LoaderOptions:
    """The settings of all epochs."""

    seed: tuple[int, ...]  # of the random streams, with the epoch
    num_workers: int  # loader processes
    further: dict[str, Any]  # other arguments of the DataLoader


def load(dataset: Any, options: LoaderOptions, epoch: int, **batching: Any) -> Iterator[Any]:
    """Iterate over one epoch; loader processes start during this call.

    Without a batch_size in `batching`, the items of the dataset are returned unchanged.
    """
    # With the global generator, the loader's draws would change the random numbers of the training
    # step.
    arguments: dict[str, Any] = {"batch_size": None, "collate_fn": _as_it_is, **batching}
    return iter(
        DataLoader(
            dataset,
            generator=torch.Generator().manual_seed(epoch_seed(options.seed, epoch)),
            num_workers=options.num_workers,
            **options.further,
            **arguments,
        )
    )


def _as_it_is(item: Any) -> Any:
    return item
