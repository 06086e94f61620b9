"""Checks the arguments of `distribute_dataset`, and merges them with a DataLoader's."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterable, Sequence
from typing import Any, TypedDict

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
    default_convert,
)
from torch.utils.data.distributed import DistributedSampler

from fastdist.data.batches import Collate
from fastdist.data.sharding import AutoShardPolicy


class DatasetOptions(TypedDict, total=False):
    """The keyword arguments of `strategy.distribute_dataset`, for type checkers."""

    global_batch_size: int | None
    shuffle: bool
    seed: int
    drop_remainder: bool
    auto_shard_policy: AutoShardPolicy
    collate_fn: Collate | None
    num_workers: int
    prefetch: int


@dataclasses.dataclass(frozen=True, slots=True)
class Request:
    """The arguments of `distribute_dataset`, merged with the arguments of a DataLoader."""

    source: Any  # after `checked`, never a DataLoader
    global_batch_size: int | None  # None only with a batch sampler, or a stream of batches
    shuffle: bool
    seed: int
    drop_remainder: bool
    policy: AutoShardPolicy
    collate_fn: Collate | None
    num_workers: int
    prefetch: int
    sampler: Iterable[Any] | None = None  # indices in the user's order
    batch_sampler: Iterable[Sequence[Any]] | None = None  # global batches of such indices
    makes_batches: bool = False  # the items of the source are global batches, not examples
    refuses_batches: bool = False  # such items are a mistake
    loading: dict[str, Any] = dataclasses.field(default_factory=dict)  # for the DataLoader


def checked(request: Request) -> Request:
    """Check all arguments, and replace a DataLoader by its dataset and settings."""
    numbers: dict[str, Any] = {
        "seed": positive_int("seed", request.seed, least=0),
        "num_workers": positive_int("num_workers", request.num_workers, least=0),
        "prefetch": positive_int("prefetch", request.prefetch, least=0),
    }
    if request.global_batch_size is not None:
        size = positive_int("global_batch_size", request.global_batch_size, least=1)
        numbers["global_batch_size"] = size
    if not isinstance(request.policy, AutoShardPolicy):
        raise TypeError(f"auto_shard_policy: expected an AutoShardPolicy, got {request.policy!r}")
    if request.collate_fn is not None and not callable(request.collate_fn):
        raise TypeError(f"collate_fn: expected a function, got {request.collate_fn!r}")
    request = dataclasses.replace(request, **numbers)
    if isinstance(request.source, DataLoader):
        return _take_apart(request.source, request)
    return request


def positive_int(name: str, value: Any, least: int) -> int:
    """Convert a value to an int; numpy's integers are accepted, bools are not."""
    if isinstance(value, bool) or not hasattr(type(value), "__index__"):
        raise TypeError(f"{name}: expected an int, got {value!r}")
    number = operator.index(value)
    if number < least:
        raise ValueError(f"{name}: expected at least {least}, got {number}")
    return number


def _take_apart(loader: DataLoader[Any], request: Request) -> Request:
    """Fill arguments that the request leaves at their defaults from the loader."""
    collate_fn = request.collate_fn
    batches = loader.batch_size is not None or loader.batch_sampler is not None
    if collate_fn is None and loader.collate_fn not in (default_collate, default_convert):
        if not batches:
            raise ValueError(
                "the DataLoader makes no batches (batch_size=None), so its collate_fn takes single "
                "examples; pass a collate_fn for lists of examples to distribute_dataset"
            )
        collate_fn = loader.collate_fn
    given = request.global_batch_size
    is_plain = type(loader.batch_sampler) is BatchSampler
    batching: Any = loader.batch_sampler if is_plain else loader
    own = batching.batch_size
    if given is not None and own not in (None, 1, given):  # 1 is DataLoader's default
        raise ValueError(
            f"the DataLoader has batch_size={own}, which becomes the global batch size, of all "
            f"replicas together; got global_batch_size={given} too: give one, or the same twice"
        )
    num_workers = request.num_workers or loader.num_workers
    names = ("timeout", "worker_init_fn", "prefetch_factor", "multiprocessing_context")
    loading = {name: getattr(loader, name) for name in names} if num_workers else {}
    taken = dataclasses.replace(
        request,
        source=loader.dataset,
        global_batch_size=given or own,
        drop_remainder=request.drop_remainder or batching.drop_last,
        collate_fn=collate_fn,
        num_workers=num_workers,
        loading=loading,
    )
    if isinstance(loader.dataset, IterableDataset):
        makes = not batches and given is None and collate_fn is None
        refuses = not batches and given is not None
        return dataclasses.replace(taken, makes_batches=makes, refuses_batches=refuses)
    return _with_sampler(loader, taken)


def _with_sampler(loader: DataLoader[Any], request: Request) -> Request:
    given: Any = loader.batch_sampler
    if given is not None and type(given) is not BatchSampler:
        if request.global_batch_size is not None or request.shuffle:
            raise ValueError(
                "the DataLoader has a batch_sampler, which determines the global batches: neither "
                "global_batch_size nor shuffle can be given"
            )
        _refuse_distributed(given)
        _refuse_distributed(getattr(given, "sampler", None))
        return dataclasses.replace(request, batch_sampler=given)
    sampler: Any = loader.sampler if given is None else given.sampler
    if type(sampler) is SequentialSampler:
        return request
    is_permutation = (
        type(sampler) is RandomSampler
        and not sampler.replacement
        and sampler.num_samples == len(sampler.data_source)
    )
    if is_permutation:
        return dataclasses.replace(request, shuffle=True)
    _refuse_distributed(sampler)
    if request.shuffle:
        raise ValueError(
            f"the DataLoader has its own {type(sampler).__name__}; shuffle=True contradicts it"
        )
    return dataclasses.replace(request, sampler=sampler)


def _refuse_distributed(sampler: Any) -> None:
    if isinstance(sampler, DistributedSampler):
        raise ValueError(
            "the DataLoader has a DistributedSampler, but distribute_dataset itself divides the "
            "data among the workers: remove the sampler, and give shuffle=True to shuffle"
        )
