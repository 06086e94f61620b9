"""torch's DataLoader as the engine that fetches, in this process or in worker processes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader


@dataclasses.dataclass(frozen=True, slots=True)
class LoaderOptions:
    """What is passed on to the DataLoader; names and units as there.

    Attributes:
        seed: ints that, with the epoch, seed the random streams of the worker processes.
    """

    seed: tuple[int, ...]
    num_workers: int = 0
    timeout: float = 0
    worker_init_fn: Callable[[int], None] | None = None
    prefetch_factor: int | None = None
    multiprocessing_context: Any = None


def load(dataset: Any, options: LoaderOptions, epoch: int, **batching: Any) -> Iterator[Any]:
    """An epoch of the dataset. Worker processes are started here, not at the first item.

    Args:
        dataset: map-style or iterable, as DataLoader takes it.
        options: for all epochs.
        epoch: which one.
        batching: sampler, batch_size, drop_last and collate_fn; without a batch_size, items come
            as the dataset gives them.
    """
    # A generator of its own: the loader would draw from the global one, and so change the random
    # numbers of the training step.
    seed = np.random.SeedSequence((*options.seed, epoch)).generate_state(1, np.uint64)[0]
    arguments: dict[str, Any] = {"batch_size": None, "collate_fn": _as_it_is, **batching}
    return iter(
        DataLoader(
            dataset,
            generator=torch.Generator().manual_seed(int(seed >> np.uint64(1))),
            num_workers=options.num_workers,
            timeout=options.timeout,
            worker_init_fn=options.worker_init_fn,
            prefetch_factor=options.prefetch_factor,
            multiprocessing_context=options.multiprocessing_context,
            **arguments,
        )
    )


def _as_it_is(item: Any) -> Any:
    return item
