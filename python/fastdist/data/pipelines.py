"""Input pipelines: read a source and cut batches for the local replicas of one worker.

A pipeline reads by index (`ArrayPipeline`, `ExamplePipeline`) and loads only the examples of the
local replicas; or it reads a whole stream (`StreamPipeline`); or it takes batches from the iterable
that a dataset function returned (`FunctionPipeline`). The batches are not yet on their devices.

`open` returns an epoch's parts without the first `skip`, and starts the loader processes. `spare`
makes batches of size zero, for a worker without data; None if the source is empty. `equal_size` is
the size of all batches before they are cut, None if sizes may differ; `reads_cpu_memory` is True if
a pipeline only copies rows from CPU memory to CPU memory.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import operator
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset

from fastdist.data.batches import Collate, arrays_in, count_examples, divided, emptied
from fastdist.data.drawing import epoch_seed, streams_by_position, with_own_draws
from fastdist.data.order import IndexOrder, RangeOrder, fingerprint
from fastdist.data.sharding import Cut
from fastdist.data.streams import IterableStream
from fastdist.replicas.per_replica import leaves, map_structure

Batches = tuple[Any, ...]  # one per local replica
Cutter = Callable[[int], Cut]  # cuts a batch of so many examples

_CERTAIN = (torch.bool, torch.int16, torch.int32, torch.int64)
_SAMPLED_ELEMENTS = 256
_SAMPLED_ROWS = 16


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """One worker's share of one step."""

    batches: Batches  # a replica without examples has a batch of size zero
    sizes: tuple[int, ...]  # examples of each local replica
    examples: tuple[int, ...]  # of each replica among which the batch was divided
    token: int = 0  # equal on all workers that cut the same global batch
    data: int = 0  # the `data` of `Origin`


@dataclasses.dataclass(frozen=True, slots=True)
class LoaderOptions:
    """The settings of a DataLoader in all epochs."""

    seed: tuple[int, ...]  # of the random streams, with the epoch
    num_workers: int  # loader processes
    further: dict[str, Any]  # other arguments of the DataLoader


class ArrayPipeline:
    """Slices a structure of tensors and numpy arrays of equal length in axis 0."""

    def __init__(self, columns: Any, order: IndexOrder, cut: Cutter) -> None:
        self._columns = map_structure(_column, columns)
        tensors = [leaf for leaf in leaves(columns) if isinstance(leaf, torch.Tensor)]
        self.reads_cpu_memory = all(tensor.device.type == "cpu" for tensor in tensors)
        self.equal_size = order.equal_size
        self._order = order
        self._cut = cut

    @property
    def steps(self) -> int | None:
        """Parts per epoch."""
        return self._order.steps

    def open(self, epoch: int, skip: int) -> Iterator[Part]:
        """Yield the parts, as copies: changing a batch in place does not change the source."""
        for indices in self._order.batches(epoch, skip):
            cut = self._cut(len(indices))
            rows = self._take(indices[cut.start : cut.stop])
            data = self.sampled_rows if cut.is_shared else 0
            yield Part(_split(rows, cut.sizes), cut.sizes, cut.examples, _token(indices), data)

    @functools.cached_property
    def sampled_rows(self) -> int:
        """A hash of some rows."""
        length = len(leaves(self._columns)[0])
        value = 0
        for row in sorted({i * (length - 1) // (_SAMPLED_ROWS - 1) for i in range(_SAMPLED_ROWS)}):
            if row not in range(length):  # there are none
                break
            for column in leaves(self._columns):
                value = _hashed(value, column[row])
        return value

    def spare(self) -> Batches | None:
        """Make batches without rows."""
        return _split(self._take(range(0)), self._cut(0).sizes)

    def _take(self, indices: Sequence[Any]) -> Any:
        if isinstance(indices, range):
            rows = slice(indices.start, indices.stop)
            return map_structure(lambda column: _copy(column[rows]), self._columns)
        array = np.asarray(indices, dtype=np.int64)
        index = torch.from_numpy(array)

        def take(column: Any) -> Any:
            if isinstance(column, torch.Tensor):
                here = index if self.reads_cpu_memory else index.to(column.device)
                return column.index_select(0, here)
            return _as_tensor(column[array])

        return map_structure(take, self._columns)


class ExamplePipeline:
    """Loads examples of a map-style dataset, in loader processes if there are any.

    The dataset has `__getitem__`, or `__getitems__` for many indices at once.
    """

    reads_cpu_memory = False

    def __init__(
        self, dataset: Any, order: IndexOrder, cut: Cutter, collate: Collate, options: LoaderOptions
    ) -> None:
        self.equal_size = order.equal_size
        self._dataset = _PartDataset(dataset, collate)
        self._order = order
        self._cut = cut
        self._options = options

    @property
    def steps(self) -> int | None:
        """Parts per epoch."""
        return self._order.steps

    def open(self, epoch: int, skip: int) -> Iterator[Part]:
        """Return the parts; examples of skipped parts are not loaded."""
        plans = self._plans(epoch, skip)
        return _load(self._dataset, self._options, epoch, sampler=plans)

    def spare(self) -> Batches | None:
        """Make batches of size zero from the first example of the first epoch."""
        first = next(self._order.batches(0, 0), None)
        if first is None:
            return None
        plan = _Plan(self._cut(0), (), _as_python(first[:1])[0], None, 0, position=0, seed=0)
        return self._dataset[plan].batches

    @functools.cached_property
    def _chosen(self) -> int:
        """A hash of the indices of Subsets."""
        value, dataset = 0, self._dataset.dataset
        while isinstance(dataset, Subset):
            value = zlib.crc32(np.asarray(dataset.indices).tobytes(), value)
            dataset = dataset.dataset
        return value

    def _plans(self, epoch: int, skip: int) -> Iterator[_Plan]:
        seed = epoch_seed(self._options.seed, epoch)
        position = 0
        for step, indices in enumerate(self._order.batches(epoch, 0)):
            if step >= skip:
                cut = self._cut(len(indices))
                mine = _as_python(indices[cut.start : cut.stop])
                compared = None
                if cut.is_shared and not step & (step - 1):  # ever less often
                    compared = self._chosen
                first = None if mine and compared is None else _as_python(indices[:1])[0]
                yield _Plan(cut, mine, first, compared, _token(indices), position, seed)
            position += len(indices)


@dataclasses.dataclass(frozen=True, slots=True)
class StreamPipeline:
    """Reads a stream of examples to the end, batch by batch, and keeps the local replicas' part.

    Resuming reads the consumed examples again and drops them.
    """

    stream: IterableDataset[Any]  # may divide itself among loader processes by `get_worker_info`
    batch_size: int | None  # before it is cut; None: the items are batches
    drop_remainder: bool
    cut: Cutter
    collate: Collate
    options: LoaderOptions
    length: int | None  # examples of the stream; None if unknown
    peek: Callable[[], list[Any]]  # returns one example, for the shapes of a batch of size zero
    refuses_batches: bool = False  # raise an error if an item looks like a batch

    reads_cpu_memory = False

    @property
    def equal_size(self) -> int | None:
        """The batch size if a remainder is dropped, else None."""
        return self.batch_size if self.drop_remainder else None

    @property
    def steps(self) -> int | None:
        """Parts per epoch; None if the length is unknown or several processes read the stream."""
        if self.options.num_workers > 1 or self.length is None:
            return None
        if self.batch_size is None:
            return self.length
        return RangeOrder(self.length, self.batch_size, self.drop_remainder, seed=None).steps

    def open(self, epoch: int, skip: int) -> Iterator[Part]:
        """Return the parts; the first `skip` parts are read and dropped."""
        batching: dict[str, Any] = {"collate_fn": functools.partial(_cut_made_batch, self.cut)}
        if self.batch_size is not None:
            refused = self.batch_size if self.refuses_batches else None
            batching = {
                "batch_size": self.batch_size,
                "drop_last": self.drop_remainder,
                "collate_fn": functools.partial(_cut_batch, self.cut, self.collate, refused),
            }
        start = functools.partial(_load, self.stream, self.options, epoch, **batching)
        if self.options.num_workers:
            parts = start()
        else:
            parts = with_own_draws(start, epoch_seed(self.options.seed, epoch))
        return itertools.islice(parts, skip, None)

    def spare(self) -> Batches | None:
        """Make batches of size zero from an example of the source."""
        for item in self.peek():
            if self.batch_size is None:
                return divided(item, count_examples(item), 0, self.cut(0).sizes)
            return collate_parts([item], 0, self.cut(0).sizes, self.collate)
        return None


@dataclasses.dataclass(frozen=True, slots=True)
class FunctionPipeline:
    """Deals the per-replica batches of an iterable to the local replicas, in order."""

    batches: IterableStream
    length: int | None  # the number of batches; None if unknown
    replicas: int
    seed: tuple[int, ...]  # of what the iterable draws, with the epoch

    reads_cpu_memory = False
    equal_size = None  # unknown

    @property
    def steps(self) -> int | None:
        """Parts per epoch; None if the iterable has no length."""
        return None if self.length is None else -(-self.length // self.replicas)

    def open(self, epoch: int, skip: int) -> Iterator[Part]:
        """Return the parts; the first `skip` parts are read and dropped."""
        seed = epoch_seed(self.seed, epoch)
        return self._deal(with_own_draws(lambda: iter(self.batches), seed), skip)

    def spare(self) -> Batches | None:
        """Make batches of size zero from the iterable's first batch."""
        for batch in self.batches.peek():
            return (emptied(batch, count_examples(batch)),) * self.replicas
        return None

    def _deal(self, batches: Iterator[Any], skip: int) -> Iterator[Part]:
        for _ in itertools.islice(batches, skip * self.replicas):
            pass
        while dealt := list(itertools.islice(batches, self.replicas)):
            sizes = [count_examples(batch) for batch in dealt]
            while len(dealt) < self.replicas:
                dealt.append(emptied(dealt[0], sizes[0]))
                sizes.append(0)
            yield Part(tuple(dealt), tuple(sizes), tuple(sizes))


Pipeline = ArrayPipeline | ExamplePipeline | StreamPipeline | FunctionPipeline


def _load(dataset: Any, options: LoaderOptions, epoch: int, **batching: Any) -> Iterator[Any]:
    """Iterate over one epoch by a DataLoader; its processes start during this call.

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


@dataclasses.dataclass(frozen=True, slots=True)
class _Plan:
    """The indices to load for one step."""

    cut: Cut
    indices: tuple[Any, ...]
    first: Any  # of the global batch: for the shapes if there are no indices, or to be compared
    compared: int | None  # a hash of what workers compare besides the first example; None: nothing
    token: int
    position: int  # of the global batch in the epoch
    seed: int  # of the epoch


class _PartDataset(Dataset[Part]):
    """A map-style dataset whose items are parts, so that loader processes also collate."""

    def __init__(self, dataset: Any, collate: Collate) -> None:
        self.dataset = dataset
        self._collate = collate

    def __getitem__(self, plan: _Plan) -> Part:
        cut, data = plan.cut, 0
        with streams_by_position(plan.seed) as begin:
            own = self._examples(plan.indices or (plan.first,), plan.position + cut.start, begin)
            if plan.compared is not None:
                is_mine = bool(plan.indices) and cut.start == 0
                data = self._hash_of_first(own[0] if is_mine else None, plan, begin)
                data = fingerprint([plan.compared, data]) if data >= 0 else data
            batches = collate_parts(own, 0, cut.sizes, self._collate)
        return Part(batches, cut.sizes, cut.examples, plan.token, data)

    def _hash_of_first(self, known: Any, plan: _Plan, begin: Callable[[int], None]) -> int:
        """Hash the global batch's first example; -1 if it cannot be had, or differs each time.

        `known` is the example if it is this worker's, else None.
        """

        def load() -> Any:
            return self._examples((plan.first,), plan.position, begin)[0]

        try:
            found = leaves(load() if known is None else known)
            certain = list(filter(_is_certain, found))
            value = functools.reduce(_hashed, certain or found, 0)
            again = value if certain else functools.reduce(_hashed, leaves(load()), 0)
            return value if again == value else -1
        except Exception:  # another worker's example, which this one need not be able to read
            return -1

    def _examples(
        self, indices: tuple[Any, ...], position: int, begin: Callable[[int], None]
    ) -> list[Any]:
        many = getattr(self.dataset, "__getitems__", None)
        if callable(many):
            begin(position)
            return list(many(list(indices)))
        examples: list[Any] = []
        for index in indices:
            begin(position + len(examples))
            examples.append(self.dataset[index])
        return examples


def _cut_batch(
    cutter: Cutter, collate: Collate, refused_rows: int | None, examples: list[Any]
) -> Part:
    """Make the worker's part of a global batch."""
    if refused_rows is not None and rows_of(examples[0]) == refused_rows:
        raise ValueError(
            f"the DataLoader with batch_size=None gives items of {refused_rows} rows, as many as "
            "global_batch_size has examples. If they are batches, leave out global_batch_size; if "
            "they are examples, pass the loader's dataset"
        )
    cut = cutter(len(examples))
    batches = collate_parts(examples, cut.start, cut.sizes, collate)
    return Part(batches, cut.sizes, cut.examples, _checksum(examples) if cut.is_shared else 0)


def _cut_made_batch(cutter: Cutter, batch: Any) -> Part:
    """Make the worker's part of a global batch that the source has made."""
    count = count_examples(batch)
    cut = cutter(count)
    parts = divided(batch, count, cut.start, cut.sizes)
    return Part(parts, cut.sizes, cut.examples, _checksum([batch]) if cut.is_shared else 0)


def rows_of(example: Any) -> int:
    """Return the rows of arrays that look like a batch, data of each and a label; 0 of others."""
    arrays = arrays_in(example)
    lengths = {array.shape[:1] for array in arrays}
    is_batch = {1} < {array.ndim for array in arrays} and len(lengths) == 1
    return int(arrays[0].shape[0]) if is_batch and arrays[0].ndim else 0


def _checksum(examples: list[Any]) -> int:
    """Hash some examples of a global batch, which every worker has read.

    Floats and bytes, which augmentations change, count only where an example has nothing else.
    """
    last = len(examples) - 1
    value = len(examples)
    for place in sorted({i * last // 7 for i in range(8)}):
        found = leaves(examples[place])
        value = functools.reduce(_hashed, list(filter(_is_certain, found)) or found, value)
    return value


def _hashed(value: int, leaf: Any) -> int:
    """Hash a value and the first elements of a leaf; objects do not count."""
    if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided:
        return fingerprint([value, leaf.detach().flatten()[:_SAMPLED_ELEMENTS].tolist()])
    if isinstance(leaf, np.ndarray):
        return fingerprint([value, leaf.ravel()[:_SAMPLED_ELEMENTS].tolist()])
    if isinstance(leaf, (int, float, complex, str)):
        return fingerprint([value, leaf])
    return fingerprint([value, leaf.item()]) if isinstance(leaf, np.generic) else value


def _is_certain(leaf: Any) -> bool:
    if isinstance(leaf, torch.Tensor):
        return leaf.dtype in _CERTAIN
    if isinstance(leaf, np.ndarray):
        return leaf.dtype.kind in "bUS" or (leaf.dtype.kind in "iu" and leaf.dtype.itemsize > 1)
    return isinstance(leaf, (int, str, np.integer))


def collate_parts(
    examples: list[Any], start: int, sizes: Sequence[int], collate: Collate
) -> Batches:
    """Make a batch of each size, from consecutive examples that begin at position `start`.

    Even if all sizes are zero there must be an example, for dtypes and shapes.
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
    """Return a tensor that shares the array's memory; the array if torch cannot represent it."""
    if isinstance(array, torch.Tensor):
        return array.detach()
    # torch warns that the tensor of a read-only array would be writable.
    return _as_tensor(array) if array.flags.writeable else array


def _as_tensor(array: Any) -> Any:
    try:
        return torch.from_numpy(array)
    except (TypeError, ValueError):  # strings, objects, foreign byte order; negative strides
        return array


def _copy(rows: Any) -> Any:
    return rows.clone() if isinstance(rows, torch.Tensor) else _as_tensor(rows.copy())
