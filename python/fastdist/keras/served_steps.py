"""The steps of a Keras model on the workers of a parameter-server job."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any

import keras
import numpy as np
import torch
from torch.utils.data import DataLoader

from fastdist.data import InputContext
from fastdist.data.batches import count_examples
from fastdist.keras.internals import DataAdapter, get_data_adapter
from fastdist.keras.metrics import flattened, is_number, values_of, variables_of
from fastdist.ps.coordinator.cluster_coordinator import ClusterCoordinator
from fastdist.ps.coordinator.per_worker import get_worker_index
from fastdist.ps.coordinator.remote_value import RemoteValue
from fastdist.replicas.per_replica import PerReplica

MakeDataset = Callable[[InputContext], Any]

_AHEAD = 2  # functions that are scheduled for each worker


class ScheduledSteps(DataAdapter):  # type: ignore[misc]
    """Schedules the steps of a `fit`, and adds their metrics to the chief's metrics.

    Keras uses it as a data adapter, whose batches only have shapes: it learns when epochs begin.

    Args:
        steps: the steps of an epoch.
        reads_logs: True if a callback or the progress bar reads the metrics of each step.
    """

    num_batches = batch_size = has_partial_batch = partial_batch_size = None

    def __init__(
        self,
        model: Any,
        coordinator: ClusterCoordinator,
        make_dataset: MakeDataset,
        steps: int,
        reads_logs: bool,
    ) -> None:
        self.is_in_epoch = False  # True from the first step of an epoch to `end_epoch`
        self._reads_logs = reads_logs
        self._model = model
        self._coordinator = coordinator
        self._strategy = strategy = coordinator.strategy
        workers = len(strategy.worker_addresses)
        # Synchronous workers take one step together.
        self._size = workers if strategy.synchronous else 1
        self._ahead = _AHEAD * workers
        make = functools.partial(WorkerBatches, make_dataset, workers, self._size)
        self._batches = iter(coordinator.create_per_worker_dataset(make))
        self._of_epoch = steps
        self._left = 0  # steps of this epoch that have not been scheduled
        self._taken = 0  # functions of this epoch that have ended
        self._running: deque[RemoteValue] = deque()
        self._numbers: dict[str, float] = {}  # logs of this epoch's steps, added up
        self._states: list[Any] = []  # values of the metrics' variables, of this epoch's steps
        self._first = coordinator.schedule(_shapes, (self._batches,)).fetch()
        coordinator.join()

    def get_torch_dataloader(self) -> Iterable[Any]:
        """Return an iterable over batches, which have shapes and no values."""
        while True:
            yield self._first

    def on_epoch_begin(self) -> None:
        """Begin to count."""
        self._left, self._taken, self._numbers = self._of_epoch, 0, {}

    def step(self) -> dict[str, Any]:
        """Wait until one more step has ended; return the logs of the epoch's steps so far.

        If nothing reads them, they are empty before the epoch's end.
        """
        self.is_in_epoch = True
        self._model.optimizer.apply.share_rate()
        given = self._model, self._strategy, self._batches
        while self._left and len(self._running) < self._ahead:
            for _ in range(self._size):
                self._running.append(self._coordinator.schedule(train_on_worker, given))
            self._left -= 1
        for _ in range(self._size):
            self._take()
        self._model.optimizer.iterations.assign_add(1)
        return self._logs() if self._reads_logs else {}

    def end_epoch(self) -> dict[str, Any]:
        """Wait for steps that have begun; return the logs. The model then has the servers' values.

        Steps are left over if a callback has stopped the training.
        """
        self.is_in_epoch = False
        while self._running:
            self._take()
        self._coordinator.join()
        return self._logs()

    def _take(self) -> None:
        """Wait for a function, and add its metrics to those of the model."""
        running = self._running
        self._strategy.backlog.wait_for(lambda: any(value.is_done() for value in running))
        self._coordinator.done()  # raises the error of a function, before the others' cancellation
        value = next(value for value in running if value.is_done())
        running.remove(value)
        numbers, states = value.fetch()
        self._taken += 1
        for name, number in numbers.items():
            self._numbers[name] = self._numbers.get(name, 0.0) + number
        if self._taken > 1:
            variables = variables_of(self._model.metrics)
            states = [
                _joined_state(variable.aggregation, before, state, self._taken)
                for variable, before, state in zip(variables, self._states, states, strict=True)
            ]
        self._states = states

    def _logs(self) -> dict[str, Any]:
        for variable, state in zip(variables_of(self._model.metrics), self._states, strict=True):
            variable.assign(state)
        results = self._model.get_metrics_result()
        means = {name: number / self._taken for name, number in self._numbers.items()}
        return {name: results.get(name, mean) for name, mean in means.items()}


def _joined_state(aggregation: str, before: Any, state: Any, count: int) -> Any:
    """Return a metric's variable for `count` functions: `before` for all but the last, `state`."""
    if aggregation == "sum":
        return before + state
    return before + (state - before) / count if aggregation == "mean" else state


class WorkerBatches:
    """The endless batches of one worker: after the last batch its dataset is made again."""

    def __init__(self, make_dataset: MakeDataset, workers: int, replicas: int) -> None:
        self._make = make_dataset
        self._context = InputContext(workers, get_worker_index(), replicas)
        self._all: Iterator[Any] = self._endless()

    def __iter__(self) -> WorkerBatches:
        return self

    def __next__(self) -> Any:
        return next(self._all)

    def peek(self) -> Any:
        """Return the next batch, which stays the next one."""
        first = next(self._all)
        self._all = chain([first], self._all)
        return first

    def _endless(self) -> Iterator[Any]:
        while True:
            is_empty = True
            for batch in self._once():
                is_empty = False
                yield batch
            if is_empty:
                raise ValueError(
                    "the function that fit was given has returned no batch for "
                    f"{self._context}; expected at least one for each worker"
                )

    def _once(self) -> Iterator[Any]:
        made = self._make(self._context)
        if isinstance(made, (np.ndarray, torch.Tensor, tuple, dict)) or not isinstance(
            made, (Iterable, keras.utils.PyDataset)
        ):
            raise TypeError(
                "the function that fit was given must return an iterable over batches (x, y), "
                f"such as a generator or a DataLoader; got {type(made).__name__}"
            )
        if not isinstance(made, (keras.utils.PyDataset, DataLoader)):
            batches = iter(made)
            first = next(batches, None)
            if first is None:
                return
            # Keras takes tuples from generators.
            made = (tuple(b) if isinstance(b, list) else b for b in chain([first], batches))
        adapter = get_data_adapter(x=made)
        adapter.on_epoch_begin()
        yield from adapter.get_torch_dataloader()
        adapter.on_epoch_end()


def _shapes(batches: WorkerBatches) -> Any:
    """Return the next batch without its values, on a worker."""
    return keras.tree.map_structure(
        lambda leaf: None if leaf is None else torch.empty_like(leaf, device="meta"), batches.peek()
    )


def train_on_worker(
    model: Any, strategy: Any, batches: WorkerBatches
) -> tuple[dict[str, float], list[Any]]:
    """Take a step on a worker; return its logs, and the variables of its metrics."""
    batch = next(batches)
    examples = (count_examples(batch),)
    numbers: dict[str, float] = strategy.run(_train, (model, PerReplica((batch,), examples)))
    return numbers, [v.cpu().numpy().copy() for v in values_of(variables_of(model.metrics))]


def _train(model: Any, batch: Any) -> dict[str, float]:
    model.reset_metrics()
    model.make_train_function()
    logs = model.train_function([batch])
    return {name: float(value) for name, value in flattened(logs or {}) if is_number(value)}
