"""The iterable over which a training loop runs."""

from __future__ import annotations

import contextlib
import dataclasses
import queue
import threading
import warnings
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import Any, Generic, TypeVar

from fastdist.data.agreement import own_data, same_data
from fastdist.data.devices import DeviceCopy
from fastdist.data.input_context import InputLayout
from fastdist.data.order import fingerprint
from fastdist.data.pipelines import Batches, Part, Pipeline
from fastdist.errors import UnsupportedError
from fastdist.recorder.phases import Phase, phase
from fastdist.replicas.context import state
from fastdist.replicas.per_replica import Origin

B = TypeVar("B")  # a batch
T = TypeVar("T")

_PATIENCE_S = 5.0
_END: Any = object()  # in place of a batch


@dataclasses.dataclass(slots=True)
class _Position:
    """The progress of an iteration."""

    epoch: int
    step: int
    begun: bool = False  # its iterator exists
    saved: bool = False  # `state_dict` was called after the last batch
    left: bool = False  # its iterator was dropped before it ended, as `break` does

    @property
    def is_over(self) -> bool:
        """True if the next iterator begins the next epoch."""
        return self.begun and not self.saved


class DistributedDataset(Generic[B]):
    """Batches for the local replicas, one epoch per `iter()` (tf.distribute.DistributedDataset).

    Yields structures like the source's examples, whose leaves are `PerReplica`: one value for each
    local replica, on its device, and the numbers of examples of all replicas. A list with one item
    per example, such as a list of strings, is a leaf too. All workers get the same number of
    steps; a replica without examples gets a batch of size zero.

    Made by `distribute_dataset` and `distribute_datasets_from_function`. Every worker must iterate.

    Examples:
        >>> import fastdist as fd, torch
        >>> strategy = fd.OneDeviceStrategy("cpu")
        >>> batches = strategy.distribute_dataset(torch.arange(6), global_batch_size=4)
        >>> len(batches), next(iter(batches))
        (2, PerReplica(
          0: tensor([0, 1, 2, 3])))
    """

    def __init__(
        self,
        pipeline: Pipeline,
        layout: InputLayout,
        prefetch: int,
        identity: Mapping[str, Any],
        rebuild: Callable[[InputLayout], DistributedDataset[B]] | None = None,
        *,
        reads_own: bool,
        is_certain: bool,
    ) -> None:
        # If shuffled: a list of one number, which datasets of the same data and settings share.
        self.finished_epochs: list[int] | None = None
        self._rebuild = rebuild  # for another layout; None if users' code made the dataset
        self.pipeline = pipeline
        self._copy: Any = DeviceCopy(layout.devices)
        if layout.make_copy is not None:
            size = pipeline.equal_size
            self._copy = layout.make_copy(size is not None and size % layout.num_replicas == 0)
        self._layout = layout
        self._reads_own = reads_own  # others may read more or less: steps may be added
        self._is_certain = is_certain  # all workers cut the same batches
        self._prefetch = prefetch
        # Copying rows takes less time than a handover from another thread.
        self._at_once = pipeline.reads_cpu_memory and self._copy.to_cpu_only
        # Must be equal for a saved position to select the same examples.
        self._identity = dict(identity)
        self.settings = tuple(self._identity.items())
        self._code = fingerprint(self.settings)
        self._position = _Position(0, 0)

    def __iter__(self) -> Iterator[B]:
        """Start the next epoch, or continue the epoch that `load_state_dict` restored.

        If an iterator is left early, the next `iter()` starts the next epoch. If `state_dict` was
        called after its last batch, the next `iter()`, also in a job that restores the state,
        continues the epoch, or starts the next one if no batch remains.
        """
        last = self._position
        epoch, step = (last.epoch + 1, 0) if last.is_over else (last.epoch, last.step)
        position = self._position = _Position(epoch, step, begun=True)
        return self._iterate(position, skip_empty=last.left and not last.is_over)

    def __len__(self) -> int:
        """Return the steps per epoch.

        Raises:
            TypeError: the number is unknown before the data is read.
        """
        steps = self.pipeline.steps
        if steps is None or self._reads_own:
            raise TypeError("the number of steps per epoch is not known for this source")
        return steps

    def set_epoch(self, epoch: int) -> None:
        """Make the next `iter()` start this epoch; its number seeds the shuffle.

        A position inside this epoch that `load_state_dict` restored, or `state_dict` returned after
        the last batch, is kept.

        Raises:
            ValueError: epoch is negative.
        """
        if epoch < 0:
            raise ValueError(f"epoch must not be negative, got {epoch}")
        if self._position.is_over or self._position.epoch != epoch:
            self._position = _Position(epoch, 0)

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last batch that the latest iterator yielded.

        Batches that were only read ahead do not count. The state consists of plain numbers and
        strings, and is the same on all workers. The next `iter()` continues here, unless the latest
        iterator yields another batch before.
        """
        self._position.saved = True
        return self.position()

    def position(self) -> dict[str, Any]:
        """Return the state like `state_dict`, without changing where the next `iter()` begins."""
        return self._state_of(self._position)

    def next_position(self) -> dict[str, Any]:
        """Return the state of the place where the next `iter()` begins."""
        last = self._position
        return self._state_of(_Position(last.epoch + 1, 0) if last.is_over else last)

    def _state_of(self, position: _Position) -> dict[str, Any]:
        return {
            "epoch": position.epoch,
            "step": position.step,
            "left": position.left,
            **self._identity,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Make the next `iter()` continue where the state was saved, with the next example.

        The number of replicas may have changed since; under DATA, so may the number of workers. A
        source that is read by index continues at once; a stream is read again from its beginning,
        and the consumed examples are dropped.

        Raises:
            ValueError: the state has other keys, or was saved with another batch size, shuffle,
                seed, policy, number of examples or files or, under FILE and OFF, number of workers.
        """
        expected = {"epoch", "step", "left", *self._identity}
        if set(state) != expected:
            raise ValueError(f"expected a state with {sorted(expected)}, got {sorted(state)}")
        for name, value in self._identity.items():
            if state[name] != value:
                raise ValueError(
                    f"the state was saved with {name}={state[name]!r}, this dataset has "
                    f"{name}={value!r}: its steps hold other examples"
                )
        epoch, step, left = int(state["epoch"]), int(state["step"]), bool(state["left"])
        self._position = _Position(epoch, step, left=left)

    def divide_anew(self, layout: InputLayout) -> None:
        """Cut the global batches of later iterators for other replicas; the position is kept.

        Raises:
            UnsupportedError: each worker reads data of its own, whose division is not known.
        """
        other = None if self._rebuild is None else self._rebuild(layout)
        if other is None or other._reads_own:
            raise UnsupportedError(
                "the ranks of an elastic job must read the same data: use distribute_dataset with "
                "AutoShardPolicy.DATA"
            )
        self.pipeline, self._copy = other.pipeline, other._copy
        self._layout, self._identity = other._layout, other._identity
        self._reads_own, self._is_certain = False, other._is_certain

    def _iterate(self, position: _Position, skip_empty: bool) -> Iterator[Any]:
        """Yield the batches of an epoch; of the next one if it was left and no batch remains."""
        try:
            has_batches = yield from self._epoch(position)
            if skip_empty and not has_batches:
                position.begun = True
                yield from self._epoch(position)
        except GeneratorExit:
            position.left = True
            raise

    def _epoch(self, position: _Position) -> Generator[Any, None, bool]:
        _require_outside_run()
        first = position.step
        if self.finished_epochs is not None and (position.epoch, first) == (0, 0):
            _begin_first_epoch(self.finished_epochs)
        parts = self._parts(position.epoch, position.step)
        try:
            agreed = parts
            if self._reads_own:
                agreed = own_data(self._layout, parts, self._spare)
            elif not self._is_certain:
                agreed = same_data(self._layout, parts)
            while (batch := self._next(agreed, position)) is not _END:
                position.step += 1
                position.saved = False
                yield batch
                _require_outside_run()
        finally:
            parts.close()  # ends the thread now, not at garbage collection
        if self.finished_epochs is not None:
            self.finished_epochs[0] += 1
        has_batches = position.step > first
        position.epoch, position.step, position.begun = position.epoch + 1, 0, False
        return has_batches

    def _next(self, parts: Iterator[Part], at: _Position) -> Any:
        with phase(Phase.DATA):
            for part in parts:
                origin = None
                if not self._reads_own:
                    epoch = at.epoch if self._identity.get("shuffle") else 0  # one order in all
                    origin = Origin(epoch, at.step, self.settings, self._code, part.data)
                return self._copy.join(part, origin)
            return _END

    def _parts(self, epoch: int, skip: int) -> Any:
        """Yield parts on their devices, read ahead if prefetch is positive."""
        opened = self.pipeline.open(epoch, skip)
        if self._at_once:
            yield from opened
            return
        shipments = map(self._copy.send, opened)
        if not self._prefetch:
            yield from map(self._copy.receive, shipments)
            return
        ahead = read_ahead(shipments, self._prefetch)
        del opened, shipments  # only the thread uses them from now on
        with contextlib.closing(ahead):
            yield from map(self._copy.receive, ahead)

    def _spare(self) -> Batches | None:
        batches = self.pipeline.spare()
        if batches is None:
            return None
        none = (0,) * len(batches)
        spare: Part = self._copy.receive(self._copy.send(Part(batches, none, none)))
        return spare.batches


def _begin_first_epoch(finished: list[int]) -> None:
    """Warn if a dataset is made anew for every epoch: all epochs have the order of the first."""
    if finished[0] == 1:
        warnings.warn(
            "a dataset of distribute_dataset(shuffle=True) was made again with the same data and "
            "seed, after one epoch: this epoch has the order of the one before. Make the dataset "
            "once, before the loop over epochs, of which each then has an order of its own, or "
            "give seed=epoch",
            stacklevel=4,  # the line that iterates
        )
    finished[0] = 0


def _require_outside_run() -> None:
    if state.replica is not None:
        raise RuntimeError(
            "a distributed dataset was iterated inside run; iterate it outside, and pass the batch "
            "to run as an argument: strategy.run(step, args=(batch,))"
        )


def read_ahead(items: Iterator[T], depth: int) -> Generator[T, None, None]:
    """Yield items, of which a thread reads `depth` ahead; only the thread may use the iterator.

    The consumer gets an exception that the iterator raises after the items before it. The thread
    ends with the items, when this generator is closed, and before the interpreter exits; each of
    these waits up to 5 s for the thread's current item.
    """
    # Items, and at the end True with the exception that ended them, or None.
    ready: queue.SimpleQueue[tuple[bool, Any]] = queue.SimpleQueue()
    room = threading.Semaphore(depth)
    stopped = threading.Event()

    def fill(items: Iterator[T]) -> None:
        error: BaseException | None = None
        try:
            while room.acquire() and not stopped.is_set():
                ready.put((False, next(items)))
        except StopIteration:
            pass
        except BaseException as caught:  # of any kind: the consumer must not wait forever
            error = caught
        ready.put((True, error))

    def stop() -> None:
        stopped.set()
        room.release()
        # The garbage collector may close the generator in any thread, also in this one.
        if thread is not threading.current_thread():
            thread.join(_PATIENCE_S)

    thread = threading.Thread(target=fill, args=(items,), name="fastdist-prefetch", daemon=True)
    del items  # so that the thread, which has opened them, closes them too
    stop_once = weakref.finalize(thread, stop)  # also at exit, while threads still run
    thread.start()
    try:
        while True:
            is_end, item = ready.get()
            if is_end:
                if item is not None:
                    raise item
                return
            room.release()
            yield item
    finally:
        stop_once()
