"""Builds distributed datasets from arrays, datasets, iterables and files."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, Dataset, IterableDataset, TensorDataset

from fastdist.data.batches import arrays_in, collate
from fastdist.data.distributed import DistributedDataset
from fastdist.data.input_context import InputContext, InputLayout
from fastdist.data.order import IndexOrder, RangeOrder, SampledOrder
from fastdist.data.pipelines import (
    ArrayPipeline,
    Cutter,
    ExamplePipeline,
    FunctionPipeline,
    LoaderOptions,
    Pipeline,
    StreamPipeline,
)
from fastdist.data.request import Request, positive_int
from fastdist.data.sharding import AutoShardPolicy, own_part, resolve_policy
from fastdist.data.streams import Files, FileStream, IterableStream, length_of
from fastdist.replicas.per_replica import leaves


def build(request: Request, layout: InputLayout) -> DistributedDataset[Any]:
    """Make the dataset of `Strategy.distribute_dataset`, whose arguments have been checked."""
    files = len(request.source.paths) if isinstance(request.source, Files) else None
    policy = resolve_policy(request.policy, files, layout.num_workers)
    if layout.num_workers == 1:
        policy = AutoShardPolicy.DATA  # for one worker all policies are equal
    return _Builder(request, layout, policy).build()


def build_from_function(
    fn: Callable[[InputContext], Iterable[Any]], layout: InputLayout, prefetch: int
) -> DistributedDataset[Any]:
    """Make the dataset of `Strategy.distribute_datasets_from_function`."""
    prefetch = positive_int("prefetch", prefetch, least=0)
    batches = fn(InputContext(layout.num_workers, layout.worker, layout.num_replicas))
    if not isinstance(batches, Iterable):
        raise TypeError(
            "the dataset function must return an iterable of per-replica batches, got "
            f"{type(batches).__name__}"
        )
    pipeline = FunctionPipeline(
        IterableStream(batches),
        length_of(batches),
        len(layout.local_replicas),
        (torch.initial_seed(),),
    )
    return DistributedDataset(
        pipeline, layout, prefetch, {}, reads_own=layout.num_workers > 1, is_certain=True
    )


@dataclasses.dataclass(frozen=True, slots=True)
class _Builder:
    """Makes the pipeline for a source."""

    request: Request
    layout: InputLayout
    policy: AutoShardPolicy

    def build(self) -> DistributedDataset[Any]:
        request = self.request
        pipeline, certain = self._pipeline(request.source)
        identity: dict[str, Any] = {
            "global_batch_size": request.global_batch_size,
            "shuffle": request.shuffle,
            "seed": request.seed,
            "policy": self.policy.value,
            "length": self._length(request.source),
        }
        if self._own_batches:
            identity["num_workers"] = self.layout.num_workers
        return DistributedDataset(
            pipeline,
            self.layout,
            request.prefetch,
            identity,
            functools.partial(build, request),
            reads_own=self._own_batches,
            is_certain=certain or self.layout.num_workers == 1,
        )

    @property
    def _own_batches(self) -> bool:
        return self.policy is not AutoShardPolicy.DATA

    def _pipeline(self, source: Any) -> tuple[Pipeline, bool]:
        """Make the pipeline; the second result is True if all workers surely use one order."""
        if isinstance(source, Files):
            return self._files(source), False
        if isinstance(source, IterableDataset):
            return self._stream(source, length_of(source), IterableStream(source).peek), False
        certain = self.request.sampler is None and self.request.batch_sampler is None
        if type(source) is TensorDataset and self.request.collate_fn is None:
            return self._arrays(source.tensors), certain
        if not isinstance(source, Dataset) and _is_arrays(source):
            return self._arrays(source), certain
        if hasattr(source, "__getitem__") and not isinstance(source, (dict, str, bytes)):
            return self._examples(source), certain
        if isinstance(source, Iterable) and not isinstance(source, (dict, str, bytes)):
            return self._iterable(source), False
        raise TypeError(
            "expected arrays (also in a tuple, dict or dataclass), a Dataset, a DataLoader, Files "
            f"or an iterable of examples, got {type(source).__name__}"
        )

    def _length(self, source: Any) -> int | None:
        """Return the number of examples, or of files; None if unknown."""
        if isinstance(source, Files):
            return len(source.paths)
        arrays = not isinstance(source, Dataset) and _is_arrays(source)
        return _common_length(source) if arrays else length_of(source)

    def _arrays(self, source: Any) -> Pipeline:
        if self.request.collate_fn is not None:
            raise ValueError(
                "arrays are sliced, not collated: give collate_fn with a Dataset of examples"
            )
        return ArrayPipeline(source, self._order(_common_length(source)), self._cutter())

    def _examples(self, source: Any) -> Pipeline:
        length = length_of(source)
        if length is None:
            raise TypeError(
                f"{type(source).__name__} has __getitem__ but no length: give it __len__, or make "
                "it an IterableDataset"
            )
        if type(source) is list and self._holds_batches(source[:2]):
            warnings.warn(
                f"the list's first examples have {self.request.global_batch_size} rows in every "
                "array, as many as a global batch has examples. distribute_dataset takes examples, "
                "and makes the batches: if the list holds batches, join them, or pass their "
                "Dataset",
                stacklevel=6,  # the line that calls strategy.distribute_dataset
            )
        collate_fn = self.request.collate_fn or collate
        return ExamplePipeline(
            source, self._order(length), self._cutter(), collate_fn, self._options()
        )

    def _holds_batches(self, examples: Sequence[Any]) -> bool:
        """Return True if several arrays of each have as many rows as a global batch."""
        arrays = [array for example in examples for array in arrays_in(example)]
        is_one_each = len(arrays) <= len(examples)
        if is_one_each or len(arrays) < sum(len(leaves(example)) for example in examples):
            return False
        size = self.request.global_batch_size
        has_data = any(array.ndim > 1 for array in arrays)
        return has_data and {array.shape[:1] for array in arrays} == {(size,)}

    def _files(self, source: Files) -> Pipeline:
        paths = source.paths
        if self.policy is AutoShardPolicy.FILE:
            paths = paths[self.layout.worker :: self.layout.num_workers]
        return self._stream(FileStream(paths, source.read), None, source.peek)

    def _iterable(self, source: Iterable[Any]) -> Pipeline:
        if self.request.num_workers:
            raise ValueError(
                f"num_workers={self.request.num_workers} needs a map-style Dataset, or an "
                "IterableDataset that divides its examples by get_worker_info; got "
                f"{type(source).__name__}, which every process would read completely"
            )
        stream = IterableStream(source)
        return self._stream(stream, length_of(source), stream.peek)

    def _stream(
        self, stream: IterableDataset[Any], length: int | None, peek: Callable[[], list[Any]]
    ) -> Pipeline:
        if self.request.shuffle:
            raise ValueError(
                "shuffle=True needs a source that is read by index; shuffle the examples of an "
                "iterable inside it, the order of files in their list, or load the data into a "
                "map-style Dataset or arrays"
            )
        return StreamPipeline(
            stream,
            None if self.request.makes_batches else self._batch_size(),
            self.request.drop_remainder,
            self._cutter(),
            self.request.collate_fn or collate,
            self._options(),
            length,
            peek,
            self.request.refuses_batches,
        )

    def _order(self, length: int) -> IndexOrder:
        request = self.request
        if request.batch_sampler is not None:
            if self._own_batches:
                raise ValueError("AutoShardPolicy.OFF needs a batch size, not a batch_sampler")
            return SampledOrder(request.batch_sampler, self._seed())
        size = self._batch_size()
        if request.sampler is not None:
            batches = BatchSampler(request.sampler, size, request.drop_remainder)
            return SampledOrder(batches, self._seed())
        seed = self._seed() if request.shuffle else None
        return RangeOrder(length, size, request.drop_remainder, seed)

    def _batch_size(self) -> int:
        """Return the size of the pipeline's batches: a global batch, or this worker's part."""
        size = self.request.global_batch_size
        if size is None:
            raise TypeError(
                "global_batch_size: expected an int, got None; the source holds examples, and "
                "distribute_dataset makes the batches; only a DataLoader may make them itself"
            )
        if not self._own_batches:
            return size
        if size < self.layout.num_replicas:
            raise ValueError(
                f"AutoShardPolicy.{self.policy.name} needs an example per replica in each global "
                f"batch, got global_batch_size={size} for {self.layout.num_replicas} replicas"
            )
        return sum(own_part(self.layout.num_replicas, self.layout.local_replicas, size).sizes)

    def _cutter(self) -> Cutter:
        if self._own_batches:
            local = range(len(self.layout.local_replicas))
            return functools.partial(own_part, len(local), local)
        return functools.partial(own_part, self.layout.num_replicas, self.layout.local_replicas)

    def _seed(self) -> tuple[int, ...]:
        """Return the seed of all draws; it differs by worker if workers read their own data."""
        own = (self.layout.worker,) if self._own_batches else ()
        return (self.request.seed, *own)

    def _options(self) -> LoaderOptions:
        request = self.request
        return LoaderOptions(self._seed(), request.num_workers, request.loading)


def _is_arrays(source: Any) -> bool:
    """Return True for an array, or for a structure whose leaves must all be arrays.

    A list is a sequence of examples, as in tf.data.
    """
    if isinstance(source, (torch.Tensor, np.ndarray)):
        return True
    return isinstance(source, (tuple, dict)) or (
        dataclasses.is_dataclass(source)
        and not isinstance(source, (type, Iterable))
        and not hasattr(source, "__getitem__")
    )


def _common_length(source: Any) -> int:
    """Return the length that all arrays have in axis 0."""
    lengths = []
    for leaf in leaves(source):
        if not isinstance(leaf, (torch.Tensor, np.ndarray)) or leaf.ndim == 0:
            what = "a scalar" if hasattr(leaf, "ndim") else type(leaf).__name__
            raise TypeError(
                "a tuple, dict or dataclass as source must hold tensors or numpy arrays with an "
                f"axis of examples, got {what}; for a sequence of examples give a list or a Dataset"
            )
        lengths.append(len(leaf))
    if not lengths:
        raise ValueError(f"expected arrays, got an empty {type(source).__name__}")
    if len({*lengths}) > 1:
        raise ValueError(f"arrays must have equal lengths in axis 0, got {lengths}")
    return lengths[0]
