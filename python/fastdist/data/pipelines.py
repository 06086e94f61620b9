"""One worker's input: from a source to batches for the local replicas, still where they were read.

A pipeline reads by index (`ArrayPipeline`, `ExamplePipeline`), where a worker loads only what its
own replicas get; or it reads a stream (`StreamPipeline`), where it must see all; or it takes what a
dataset function returned (`FunctionPipeline`).
"""

from __future__ import annotations

import dataclasses
import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset

from fastdist.data.batches import Collate, count_examples, emptied
from fastdist.data.loading import LoaderOptions, load
from fastdist.data.order import IndexOrder, fingerprint
from fastdist.data.sharding import Cut, Cutter
from fastdist.data.streams import IterableStream
from fastdist.replicas.per_replica import leaves, map_structure

Batches = tuple[Any, ...]  # one per local replica


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """What one worker has of one step.

    Attributes:
        batches: one per local replica; where it has no examples, a batch of size zero.
        sizes: examples of each local replica.
        examples: of every replica that the batch was cut for.
        token: equal on all workers that cut the same global batch.
    """

    batches: Batches
    sizes: tuple[int, ...]
    examples: tuple[int, ...]
    token: int = 0


class Pipeline(Protocol):
    """One worker's input, epoch after epoch.

    Attributes:
        reads_cpu_memory: whether it does nothing but copy rows from CPU memory to CPU memory.
    """

    @property
    def reads_cpu_memory(self) -> bool: ...  # noqa: D102

    @property
    def steps(self) -> int | None:
        """Parts per epoch; None where it cannot be known."""

    @property
    def batch_sizes(self) -> frozenset[int] | None:
        """The sizes that the batches to be cut have; None where they cannot be known."""

    def open(self, epoch: int, skip: int) -> Iterator[Part]:
        """An epoch's parts without the first `skip`. Worker processes start here, not later."""

    def spare(self) -> Batches | None:
        """Batches of size zero for a worker that has no data; None if the source holds none."""


class ArrayPipeline:
    """Slices arrays that are in memory.

    Args:
        columns: a structure of tensors and numpy arrays of equal length in axis 0.
        order: of the rows.
        cut: cuts a batch for the local replicas.
    """

    def __init__(self, columns: Any, order: IndexOrder, cut: Cutter) -> None:
        self._columns = map_structure(_column, columns)
        tensors = [leaf for leaf in leaves(columns) if isinstance(leaf, torch.Tensor)]
        self._on_cpu = all(tensor.device.type == "cpu" for tensor in tensors)
        self._order = order
        self._cut = cut

    @property
    def steps(self) -> int | None:
        """Parts per epoch."""
        return self._order.steps

    @property
    def batch_sizes(self) -> frozenset[int] | None:
        """Those of the order."""
        return self._order.batch_sizes

    @property
    def reads_cpu_memory(self) -> bool:
        """Whether all arrays are in CPU memory."""
        return self._on_cpu

    def open(self, epoch: int, skip: int) -> Iterator[Part]:
        """The parts: copies, so that who changes a batch in place leaves the data alone."""
        for indices in self._order.batches(epoch, skip):
            cut = self._cut(len(indices))
            rows = self._take(indices[cut.start : cut.stop])
            yield Part(_split(rows, cut.sizes), cut.sizes, cut.examples, _token(indices))

    def spare(self) -> Batches | None:
        """No rows of each column."""
        return _split(self._take(range(0)), self._cut(0).sizes)

    def _take(self, indices: Sequence[Any]) -> Any:
        if isinstance(indices, range):
            rows = slice(indices.start, indices.stop)
            return map_structure(lambda column: _copy(column[rows]), self._columns)
        array = np.asarray(indices, dtype=np.int64)
        index = torch.from_numpy(array)

        def take(column: Any) -> Any:
            if isinstance(column, torch.Tensor):
                here = index if self._on_cpu else index.to(column.device)
                return column.index_select(0, here)
            return _as_tensor(column[array])

        return map_structure(take, self._columns)


class ExamplePipeline:
    """Loads examples of a map-style dataset, in loader processes where asked to.

    Args:
        dataset: with `__getitem__`, or `__getitems__` for many indices at once.
        order: of the indices.
        cut: cuts a batch for the local replicas.
        collate: makes a batch from a list of examples.
        options: of the DataLoader that loads.
    """

    reads_cpu_memory = False

    def __init__(
        self, dataset: Any, order: IndexOrder, cut: Cutter, collate: Collate, options: LoaderOptions
    ) -> None:
        self._dataset = _PartDataset(dataset, collate)
        self._order = order
        self._cut = cut
        self._options = options

    @property
    def steps(self) -> int | None:
        """Parts per epoch."""
        return self._order.steps

    @property
    def batch_sizes(self) -> frozenset[int] | None:
        """Those of the order."""
        return self._order.batch_sizes

    def open(self, epoch: int, skip: int) -> Iterator[Part]:
        """The parts; nothing is loaded for those that are skipped."""
        plans = self._plans(self._order.batches(epoch, skip))
        return load(self._dataset, self._options, epoch, sampler=plans)

    def spare(self) -> Batches | None:
        """Made from the first example of the first epoch."""
        first = next(self._order.batches(0, 0), None)
        if first is None:
            return None
        return self._dataset[_Plan(self._cut(0), (), _as_python(first[:1])[0], 0)].batches

    def _plans(self, batches: Iterable[Sequence[Any]]) -> Iterator[_Plan]:
        for indices in batches:
            cut = self._cut(len(indices))
            mine = _as_python(indices[cut.start : cut.stop])
            spare = None if mine else _as_python(indices[:1])[0]
            yield _Plan(cut, mine, spare, _token(indices))


class StreamPipeline:
    """Reads a stream of examples to the end, batch by batch, and keeps the local replicas' part.

    Resuming reads what was consumed again and drops it.

    Args:
        stream: the examples; may share them out among worker processes by `get_worker_info`.
        batch_size: examples per batch that is cut.
        drop_remainder: whether a last batch with fewer examples is dropped.
        cut: cuts a batch for the local replicas.
        collate: makes a batch from a list of examples.
        options: of the DataLoader that loads.
        length: how many examples the stream has, where known.
        peek: gives a list of one example of the source, or none, for a batch of size zero.
    """

    reads_cpu_memory = False

    def __init__(
        self,
        stream: IterableDataset[Any],
        batch_size: int,
        drop_remainder: bool,
        cut: Cutter,
        collate: Collate,
        options: LoaderOptions,
        length: int | None,
        peek: Callable[[], list[Any]],
    ) -> None:
        self._stream = stream
        self._batch_size = batch_size
        self._drop_remainder = drop_remainder
        self._cut_batch = _CutBatch(cut, collate)
        self._options = options
        self._length = length
        self._peek = peek

    @property
    def steps(self) -> int | None:
        """Parts per epoch, if the length is known and one process reads the stream."""
        if self._options.num_workers > 1 or self._length is None:
            return None
        whole, rest = divmod(self._length, self._batch_size)
        return whole + (1 if rest and not self._drop_remainder else 0)

    @property
    def batch_sizes(self) -> frozenset[int] | None:
        """Known where a remainder is dropped."""
        return frozenset({self._batch_size}) if self._drop_remainder else None

    def open(self, epoch: int, skip: int) -> Iterator[Part]:
        """The parts, of which the first `skip` are read and dropped."""
        parts = load(
            self._stream,
            self._options,
            epoch,
            batch_size=self._batch_size,
            drop_last=self._drop_remainder,
            collate_fn=self._cut_batch,
        )
        return itertools.islice(parts, skip, None)

    def spare(self) -> Batches | None:
        """Made from any example of the source."""
        for example in self._peek():
            return self._cut_batch.empty(example)
        return None


class FunctionPipeline:
    """Deals the per-replica batches of an iterable to the local replicas, in order.

    Args:
        batches: iterated anew in every epoch.
        length: how many it holds, where known.
        replicas: number of local replicas.
    """

    reads_cpu_memory = False

    def __init__(self, batches: IterableStream, length: int | None, replicas: int) -> None:
        self._batches = batches
        self._length = length
        self._replicas = replicas

    @property
    def steps(self) -> int | None:
        """Parts per epoch, if the iterable has a length."""
        return None if self._length is None else -(-self._length // self._replicas)

    @property
    def batch_sizes(self) -> frozenset[int] | None:
        """Not known."""
        return None

    def open(self, epoch: int, skip: int) -> Iterator[Part]:
        """The parts, of which the first `skip` are read and dropped."""
        return self._deal(iter(self._batches), skip)

    def spare(self) -> Batches | None:
        """Made from the iterable's first batch."""
        for batch in self._batches.peek():
            return (emptied(batch, count_examples(batch)),) * self._replicas
        return None

    def _deal(self, batches: Iterator[Any], skip: int) -> Iterator[Part]:
        for _ in itertools.islice(batches, skip * self._replicas):
            pass
        while dealt := list(itertools.islice(batches, self._replicas)):
            sizes = [count_examples(batch) for batch in dealt]
            while len(dealt) < self._replicas:
                dealt.append(emptied(dealt[0], sizes[0]))
                sizes.append(0)
            yield Part(tuple(dealt), tuple(sizes), tuple(sizes))


@dataclasses.dataclass(frozen=True, slots=True)
class _Plan:
    """What to load for one step: the local examples, or any one if there are none."""

    cut: Cut
    indices: tuple[Any, ...]
    spare: Any
    token: int


class _PartDataset(Dataset[Part]):
    """A map-style dataset whose items are whole parts, so that worker processes also collate."""

    def __init__(self, dataset: Any, collate: Collate) -> None:
        self._dataset = dataset
        self._collate = collate

    def __getitem__(self, plan: _Plan) -> Part:
        own = self._examples(plan.indices or (plan.spare,))
        batches = collate_parts(own, 0, plan.cut.sizes, self._collate)
        return Part(batches, plan.cut.sizes, plan.cut.examples, plan.token)

    def _examples(self, indices: tuple[Any, ...]) -> list[Any]:
        many = getattr(self._dataset, "__getitems__", None)
        if callable(many):
            return list(many(list(indices)))
        return [self._dataset[index] for index in indices]


class _CutBatch:
    """As a DataLoader's collate_fn: the worker's part of the global batch that it is given."""

    def __init__(self, cut: Cutter, collate: Collate) -> None:
        self._cut = cut
        self._collate = collate

    def __call__(self, examples: list[Any]) -> Part:
        cut = self._cut(len(examples))
        batches = collate_parts(examples, cut.start, cut.sizes, self._collate)
        return Part(batches, cut.sizes, cut.examples, len(examples))

    def empty(self, example: Any) -> Batches:
        return collate_parts([example], 0, self._cut(0).sizes, self._collate)


def collate_parts(
    examples: list[Any], start: int, sizes: Sequence[int], collate: Collate
) -> Batches:
    """A batch for each of `sizes`, from `start` on; those of size zero after the shape of others.

    Args:
        examples: at least one, even if all sizes are zero.
    """
    made: list[Any] = []
    for size in sizes:
        if size:
            made.append(collate(examples[start : start + size]))
        else:
            made.append(emptied(made[0], sizes[0]) if made else emptied(collate(examples[:1]), 1))
        start += size
    return tuple(made)


def _as_python(indices: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(indices.tolist() if isinstance(indices, np.ndarray) else indices)


def _token(indices: Sequence[Any]) -> int:
    return fingerprint(indices) if isinstance(indices, list) else 0


def _split(rows: Any, sizes: Sequence[int]) -> Batches:
    if len(sizes) == 1:
        return (rows,)
    stops = itertools.accumulate(sizes)
    pieces = [slice(stop - size, stop) for stop, size in zip(stops, sizes, strict=True)]
    return tuple(map_structure(operator.itemgetter(piece), rows) for piece in pieces)


def _column(array: Any) -> Any:
    """The tensor over the array's memory, or the array where torch has no such tensor."""
    if isinstance(array, torch.Tensor):
        return array.detach()
    # Of a read-only array torch would make a writable tensor, and it warns.
    return _as_tensor(array) if array.flags.writeable else array


def _as_tensor(array: Any) -> Any:
    try:
        return torch.from_numpy(array)
    except (TypeError, ValueError):  # strings, objects, foreign byte order; negative strides
        return array


def _copy(rows: Any) -> Any:
    return rows.clone() if isinstance(rows, torch.Tensor) else _as_tensor(rows.copy())
