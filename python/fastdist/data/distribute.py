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

from fastdist.data.agreement import Agreement, Known, OwnData, SameData
from fastdist.data.batches import Collate, arrays_in, collate
from fastdist.data.distributed import DistributedDataset
from fastdist.data.input_context import InputContext, InputLayout
from fastdist.data.loading import LoaderOptions
from fastdist.data.order import IndexOrder, RangeOrder, SampledOrder
from fastdist.data.pipelines import (
    ArrayPipeline,
    ExamplePipeline,
    FunctionPipeline,
    Pipeline,
    StreamPipeline,
)
from fastdist.data.request import Request, checked, positive_int
from fastdist.data.sharding import AutoShardPolicy, Cutter, resolve_policy
from fastdist.data.streams import Files, FileStream, IterableStream, length_of
from fastdist.replicas.per_replica import leaves


def distribute_dataset(
    source: Any,
    layout: InputLayout,
    *,
    global_batch_size: int | None = None,
    shuffle: bool = False,
    seed: int = 0,
    drop_remainder: bool = False,
    auto_shard_policy: AutoShardPolicy = AutoShardPolicy.AUTO,
    collate_fn: Collate | None = None,
    num_workers: int = 0,
    prefetch: int = 2,
) -> DistributedDataset[Any]:
    """Cut a source into global batches, and each global batch into one part per replica.

    Corresponds to tf.distribute.Strategy.experimental_distribute_dataset, but the source holds
    examples, not batches. Every worker must call, with the same source and arguments. An empty
    source gives epochs without steps; a source with fewer examples than replicas gives some
    replicas batches of size zero.

    Args:
        source: the examples, as
            arrays: a tensor or numpy array, or a tuple, dict or dataclass of arrays of equal length
            in axis 0, whose rows are the examples; they are in memory, so num_workers is ignored;
            a map-style Dataset or any sequence, such as a list of examples: each worker loads only
            the examples of its replicas, and ever less often one more, to compare;
            an IterableDataset or any iterable of examples: each worker reads all examples;
            a DataLoader: its dataset, batch_size as global batch size, collate_fn, num_workers,
            drop_last and sampler are used (a RandomSampler becomes shuffle=True; any other sampler,
            and a batch_sampler, must give the same order on every worker). With batch_size=None and
            no global_batch_size, the items of its IterableDataset are global batches. Batches for a
            GPU are pinned, with or without pin_memory;
            `Files`.
        layout: the replicas and workers of the job.
        global_batch_size: examples per step of all replicas; required unless a DataLoader has it,
            or gives batches.
        shuffle: draw a new order in every epoch, from the seed and the epoch's number; the same for
            all numbers of replicas and workers (under OFF each worker draws its own).
        seed: a non-negative seed of the shuffle, and of what samplers, datasets and collate_fn draw
            from torch's default generator. What is drawn for an example of a map-style source
            depends on the seed, the epoch and the example's position alone: not on the number of
            replicas, workers and loader processes, nor on the step at which the epoch was resumed.
        drop_remainder: leave out a last batch with fewer examples.
        auto_shard_policy: the way workers share the source.
        collate_fn: a function that makes a batch from a list of examples; None: torch's
            default_collate, extended to keep tuples and to accept dataclasses.
        num_workers: loader processes of this worker. An IterableDataset must divide its examples
            among them by `get_worker_info`. With 0, examples are loaded in the thread that reads
            ahead, where each operation of torch costs some microseconds more. Loader processes
            seed the default generators of numpy and Python's `random` as they seed torch's; with 0
            these two are shared with the training step, so that their draws depend on timing, and
            a dataset that calls `torch.manual_seed` seeds the training step's generator.
        prefetch: steps to read ahead and copy to the devices in a thread; 0: no thread. Arrays
            that are sliced for CPUs use no thread either: it would cost more than it saves.

    Raises:
        TypeError: the source or an argument has an unsupported type.
        ValueError: arrays have different lengths, a number is out of range, or arguments contradict
            each other; the message names them.

    Examples:
        >>> import fastdist as fd, torch
        >>> cpu = (torch.device("cpu"),)  # one replica
        >>> layout = fd.data.InputLayout(1, (0,), 1, 0, cpu, lambda ints: [list(ints)])
        >>> list(fd.data.distribute_dataset(torch.arange(3), layout, global_batch_size=2))
        [PerReplica(
          0: tensor([0, 1])), PerReplica(
          0: tensor([2]))]
    """
    request = checked(
        Request(
            source,
            global_batch_size,
            shuffle,
            seed,
            drop_remainder,
            auto_shard_policy,
            collate_fn,
            num_workers,
            prefetch,
        )
    )
    return _build(request, layout)


def _build(request: Request, layout: InputLayout) -> DistributedDataset[Any]:
    files = len(request.source.paths) if isinstance(request.source, Files) else None
    policy = resolve_policy(request.policy, files, layout.num_workers)
    if layout.num_workers == 1:
        policy = AutoShardPolicy.DATA  # for one worker all policies are equal
    return _Builder(request, layout, policy).build()


def distribute_datasets_from_function(
    fn: Callable[[InputContext], Iterable[Any]], layout: InputLayout, *, prefetch: int = 2
) -> DistributedDataset[Any]:
    """Take per-replica batches from an iterable that each worker makes itself.

    Corresponds to tf.distribute.Strategy.distribute_datasets_from_function. Each step takes one
    batch for each local replica, in order. A replica for which the iterable has no batch left gets
    a batch of size zero; the epoch ends when the iterables of all workers are exhausted. Every
    worker must call.

    Args:
        fn: a function that is called once, during this call, with the `InputContext`. It returns an
            iterable of per-replica batches, such as a DataLoader, which is iterated anew in every
            epoch. What it draws from torch's default generator in an epoch comes from a stream of
            its own, which `torch.manual_seed`, called before, and the epoch determine.
        layout: the replicas and workers of the job.
        prefetch: steps to read ahead and copy to the devices in a thread; 0: no thread.

    Raises:
        TypeError: fn returned an object that is not iterable.
        ValueError: prefetch is negative.

    Examples:
        >>> import fastdist as fd, torch
        >>> cpu = (torch.device("cpu"),)  # one replica
        >>> layout = fd.data.InputLayout(1, (0,), 1, 0, cpu, lambda ints: [list(ints)])
        >>> batches = torch.arange(4).split(2)
        >>> list(fd.data.distribute_datasets_from_function(lambda context: batches, layout))
        [PerReplica(
          0: tensor([0, 1])), PerReplica(
          0: tensor([2, 3]))]
    """
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
    agreement: Agreement = Known() if layout.num_workers == 1 else OwnData(layout)
    return DistributedDataset(pipeline, layout, agreement, prefetch, {})


@dataclasses.dataclass(frozen=True, slots=True)
class _Builder:
    """Makes the pipeline for a source, and the agreement that the pipeline needs."""

    request: Request
    layout: InputLayout
    policy: AutoShardPolicy

    def build(self) -> DistributedDataset[Any]:
        request = self.request
        pipeline, certain = self._pipeline(request.source)
        agreement: Agreement = Known()
        if self._own_batches:
            agreement = OwnData(self.layout)
        elif self.layout.num_workers > 1 and not certain:
            agreement = SameData(self.layout)
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
            agreement,
            request.prefetch,
            identity,
            functools.partial(_build, request),
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
                stacklevel=7,  # the line that calls strategy.distribute_dataset
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
            sampler = getattr(request.batch_sampler, "sampler", None)
            has_epoch = hasattr(request.batch_sampler, "set_epoch")
            return SampledOrder(
                request.batch_sampler,
                request.batch_sampler if has_epoch else sampler,
                self._seed(),
            )
        size = self._batch_size()
        if request.sampler is not None:
            batches = BatchSampler(request.sampler, size, request.drop_remainder)
            return SampledOrder(batches, request.sampler, self._seed())
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
        return sum(Cutter(self.layout.num_replicas, self.layout.local_replicas)(size).sizes)

    def _cutter(self) -> Cutter:
        if self._own_batches:
            local = range(len(self.layout.local_replicas))
            return Cutter(len(local), local)
        return Cutter(self.layout.num_replicas, self.layout.local_replicas)

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
