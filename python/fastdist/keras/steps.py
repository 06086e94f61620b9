"""The steps of a Keras model on one replica, and its parts of the global batches.

Keras makes the global batches, with its `batch_size`, shuffling, sample weights and class weights.
Batches of arrays and of map-style DataLoaders are cut before they are loaded, others after.
"""

from __future__ import annotations

import random
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from operator import attrgetter
from typing import Any

import keras
import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset

from fastdist.collectives.communicator import Communicator
from fastdist.collectives.init import default_communicator
from fastdist.data import DistributedDataset
from fastdist.data.agreement import same_data
from fastdist.data.batches import count_examples
from fastdist.data.input_context import InputLayout
from fastdist.data.order import fingerprint
from fastdist.data.pipelines import Part
from fastdist.data.sharding import own_part
from fastdist.keras.internals import ArrayDataAdapter, DataAdapter
from fastdist.keras.layers import separate_random_numbers
from fastdist.keras.losses import share_losses
from fastdist.keras.metrics import unchanged, weigh_means
from fastdist.keras.optimizers import share_steps
from fastdist.replicas.per_replica import Origin, PerReplica, select
from fastdist.strategies.base import batch_of
from fastdist.strategies.replicated import ReplicatedStrategy

_SAMPLED_ROWS = 16  # rows of arrays that replicas compare
_OF_LOADERS = (
    *("num_workers", "prefetch_factor", "collate_fn", "pin_memory", "timeout", "worker_init_fn"),
    *("multiprocessing_context", "generator"),
)


class ReplicaSteps:
    """Runs the steps of a model in `strategy.run`.

    Attributes:
        examples: examples of each replica in the next step's batch; None if unknown.
        origin: where that batch comes from; None if Keras has made it.
        last_examples: the `examples` of the last step.
    """

    def __init__(self, model: weakref.ref[Any], strategy: ReplicatedStrategy) -> None:
        self.examples: tuple[int, ...] | None = None
        self.origin: Origin | None = None
        self.last_examples: tuple[int, ...] | None = None
        self.strategy = strategy
        self._model = model
        self._result: Any = None  # of the last step
        self._seeds = torch.Generator()  # of the steps
        self._seeded_from = -1

    def workers(self) -> Communicator:
        """Return the communicator of all replicas."""
        return self.strategy._members.connect() or default_communicator()  # of one rank

    def begin_pass(self) -> None:
        """Give all replicas the chief's random state, so that all shuffle in the same order.

        The seeds of the next steps are derived from it, unless it has not changed.
        """
        state = torch.get_rng_state(), random.getstate(), np.random.get_state()
        workers = self.workers()
        torch_state, python_state, numpy_state = workers.broadcast_object(state)
        if workers.rank:
            torch.set_rng_state(torch_state)
            random.setstate(python_state)
            np.random.set_state(numpy_state)
        found = zlib.crc32(torch.get_rng_state().numpy().data)
        if found != self._seeded_from:
            self._seeded_from = found
            self._seeds.manual_seed(found)

    def random_state(self) -> tuple[int, torch.Tensor]:
        """Return the state of the generator of the steps' seeds, for backups."""
        return self._seeded_from, self._seeds.get_state()

    def set_random_state(self, state: tuple[int, torch.Tensor]) -> None:
        """Set what `random_state` has returned."""
        self._seeded_from, seeds = state
        self._seeds.set_state(seeds)

    def prepare(self) -> None:
        """Adapt what the model has built by now. Every replica must call."""
        model: Any = self._model()
        separate_random_numbers(model)
        share_losses(model)
        weigh_means(model.metrics)
        share_steps(model, self.strategy)
        self.strategy.refresh()

    def train_or_test(self, function: Callable[..., Any], data: Any) -> Any:
        """Call a function that updates the metrics; return this replica's logs."""
        is_borrowed = self._take_examples()
        model: Any = self._model()
        with unchanged(model.metrics if is_borrowed else ()):
            return self._run(function, data)

    def predict(self, function: Callable[..., Any], data: Any) -> Any:
        """Call a function; return the outputs for the examples of all replicas, in order."""
        is_borrowed = self._take_examples()
        return keras.tree.map_structure(
            lambda output: self.strategy.gather(output[:0] if is_borrowed else output, 0),
            self._run(function, data),
        )

    def _take_examples(self) -> bool:
        """Begin a step; return True if this replica computes a borrowed example."""
        (replica,) = self.strategy.local_replica_ids
        examples = self.last_examples = self.examples
        self.examples = None
        return examples is not None and not examples[replica]

    def _run(self, function: Callable[..., Any], data: Any) -> Any:
        """Call a function in `strategy.run`; the process's random state stays as it was.

        So several replicas and one device shuffle in the same order after any number of steps.
        """
        seed = torch.empty((), dtype=torch.int64).random_(generator=self._seeds)
        given = PerReplica(((function, data),), self.last_examples, origin=self.origin)
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(int(seed))
            self.strategy.run(self._call, (given,))
        result, self._result = self._result, None
        return result

    def _call(self, step: tuple[Callable[..., Any], Any]) -> None:
        function, data = step
        self._result = function(data)


def cut(count: int, layout: InputLayout) -> tuple[slice, tuple[int, ...]]:
    """Return this replica's rows of `count`, and every replica's number of examples.

    A replica without examples computes with the first row, which does not count.
    """
    part = own_part(layout.num_replicas, layout.local_replicas, count)
    return slice(part.start, part.stop) if part.sizes[0] else slice(1), part.examples


def cut_batch(batch: Any, layout: InputLayout) -> tuple[Any, tuple[int, ...]]:
    """Return this replica's part of a batch in memory, and every replica's examples."""
    rows, examples = cut(count_examples(batch), layout)
    part = keras.tree.map_structure(lambda leaf: None if leaf is None else leaf[rows], batch)
    return part, examples


class PartAdapter(DataAdapter):  # type: ignore[misc]
    """Yields this replica's part of each batch of `whole`, Keras' adapter of the global batches."""

    def __init__(self, whole: Any, steps: ReplicaSteps) -> None:
        self._whole = whole
        self._steps = steps
        self._layout = steps.strategy._input_layout()
        self._is_arrays = isinstance(whole, ArrayDataAdapter)

    # What the adapter of the global batches says of them.
    num_batches = property(attrgetter("_whole.num_batches"))
    batch_size = property(attrgetter("_whole.batch_size"))
    has_partial_batch = property(attrgetter("_whole.has_partial_batch"))
    partial_batch_size = property(attrgetter("_whole.partial_batch_size"))
    on_epoch_begin = property(attrgetter("_whole.on_epoch_begin"))
    on_epoch_end = property(attrgetter("_whole.on_epoch_end"))

    def get_torch_dataloader(self) -> Iterable[Any]:
        """Return an iterable over this replica's parts."""
        return self

    def __iter__(self) -> Iterator[Any]:
        self._steps.begin_pass()
        loader = self._whole.get_torch_dataloader()
        is_indexed = (
            isinstance(loader, DataLoader)
            and loader.batch_sampler is not None
            and not isinstance(loader.dataset, IterableDataset)
        )
        if self._is_arrays:
            _require_same_arrays(self._steps.workers(), loader.dataset, self._whole)
        parts = self._load_parts(loader) if is_indexed else self._cut_batches(iter(loader))
        return self._noted(parts if self._is_arrays else same_data(self._layout, parts))

    def _noted(self, parts: Iterator[Part]) -> Iterator[Any]:
        for part in parts:
            self._steps.examples, self._steps.origin = part.examples, None
            yield part.batches[0]

    def _load_parts(self, loader: Any) -> Iterator[Part]:
        """Load this replica's examples only."""
        # For each batch that was sampled and not used yet: every replica's examples, and a number
        # that is equal on replicas that sampled the same batch.
        noted: deque[tuple[tuple[int, ...], int]] = deque()

        def own_indices() -> Iterator[list[Any]]:
            for batch in loader.batch_sampler:
                indices = list(batch)
                rows, examples = cut(len(indices), self._layout)
                noted.append((examples, fingerprint(indices)))
                yield indices[rows]

        options = {name: getattr(loader, name) for name in _OF_LOADERS}
        own: DataLoader[Any] = DataLoader(loader.dataset, batch_sampler=own_indices(), **options)
        batches = iter(own)  # draws from the random state now, as Keras' own iterator does
        return (Part((batch,), (), *noted.popleft()) for batch in batches)

    def _cut_batches(self, batches: Iterator[Any]) -> Iterator[Part]:
        for batch in batches:
            part, examples = cut_batch(batch, self._layout)
            yield Part((part,), (), examples, _checksum(batch))


class DistributedAdapter(DataAdapter):  # type: ignore[misc]
    """A Keras data adapter of a distributed dataset, which is cut already."""

    batch_size = has_partial_batch = partial_batch_size = None

    def __init__(self, dataset: DistributedDataset[Any], steps: ReplicaSteps) -> None:
        self._dataset = dataset
        self._steps = steps

    @property
    def num_batches(self) -> int | None:
        """Number of batches of an epoch; None if unknown."""
        try:
            return len(self._dataset)
        except TypeError:
            return None

    def get_torch_dataloader(self) -> Iterable[Any]:
        """Return an iterable over this replica's parts."""
        return self

    def __iter__(self) -> Iterator[Any]:
        (replica,) = self._steps.strategy.local_replica_ids
        for batch in self._dataset:
            value = batch_of(batch)
            assert value is not None
            assert value.examples is not None
            self._steps.examples, self._steps.origin = value.examples, value.origin
            own, has_examples = select(batch), value.examples[replica]
            yield own if has_examples else keras.tree.map_structure(_one_row, own)


def _one_row(leaf: Any) -> Any:
    """Return a row of zeros to compute with, for a batch without examples."""
    return leaf.new_zeros((1, *leaf.shape[1:])) if isinstance(leaf, torch.Tensor) else leaf


def _require_same_arrays(workers: Communicator, dataset: Any, whole: Any) -> None:
    """Compare a sample of the arrays' rows, and their batching. Every replica must call."""
    count = whole._num_samples
    rows = sorted({i * (count - 1) // (_SAMPLED_ROWS - 1) for i in range(_SAMPLED_ROWS)})
    given = f"batch_size={whole.batch_size}, shuffle={whole._shuffle}"
    values = _checksum(dataset.__getitems__(rows)) if count else 0
    own = np.array([count, values, zlib.crc32(given.encode())])
    table = workers.all_gather(own[None]).tolist()
    differing = [replica for replica, row in enumerate(table) if row != table[0]]
    if differing:
        counts = ", ".join(f"{row[0]} on replica {i}" for i, row in enumerate(table))
        raise ValueError(
            f"the arrays of replicas {differing}, or their batches, differ from those of replica "
            f"0: got {counts} examples and {given} here; expected the same arrays, batch_size and "
            "shuffle on all replicas (if arrays are made at random, seed the generator)"
        )


def _checksum(batch: Any) -> int:
    """Hash the number of rows, the shapes and the first kilobytes of each array of a batch."""
    value = 0
    for leaf in keras.tree.flatten(batch):
        value = zlib.crc32(repr(tuple(getattr(leaf, "shape", ()))).encode(), value)
        if isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided and leaf.numel():
            flat = leaf.detach().reshape(-1)[:1024].cpu().contiguous()
            value = zlib.crc32(flat.view(torch.uint8).numpy().data, value)
    return value
