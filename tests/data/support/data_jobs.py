"""Jobs of several workers inside one process, for the tests of fastdist.data."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import fastdist as fd
import torch
from fastdist.data import DistributedDataset, InputContext
from fastdist.data.distribute import build, build_from_function
from fastdist.data.input_context import InputLayout
from fastdist.data.request import Request, checked
from fastdist.replicas.per_replica import PerReplica, leaves, map_structure
from torch.utils.data import Dataset

T = TypeVar("T")
_OPTIONS = inspect.signature(fd.Strategy.distribute_dataset).parameters.values()
_DEFAULTS = {each.name: each.default for each in _OPTIONS if each.kind is each.KEYWORD_ONLY}


def distribute_dataset(source: Any, layout: InputLayout, **options: Any) -> DistributedDataset[Any]:
    """The dataset of a strategy with this layout."""
    assert options.keys() <= _DEFAULTS.keys()
    return build(checked(Request(source, *(_DEFAULTS | options).values())), layout)


def distribute_datasets_from_function(
    fn: Callable[[InputContext], Iterable[Any]], layout: InputLayout, prefetch: int = 2
) -> DistributedDataset[Any]:
    return build_from_function(fn, layout, prefetch)


class Exchange:
    """all_gather_ints among threads; whom nobody joins gets an error instead of a hang."""

    def __init__(self, num_workers: int) -> None:
        self._barrier = threading.Barrier(num_workers, timeout=20)
        self._messages: list[list[int]] = [[] for _ in range(num_workers)]
        self.threads: set[str] = set()

    def gather(self, worker: int, ints: Sequence[int]) -> list[list[int]]:
        self.threads.add(threading.current_thread().name)
        self._messages[worker] = list(ints)
        self._barrier.wait()
        answers = [list(message) for message in self._messages]
        self._barrier.wait()
        assert len({len(answer) for answer in answers}) == 1
        return answers


def layouts(num_workers: int, replicas: int = 1, may_ask: bool = True) -> list[InputLayout]:
    """One per worker; `may_ask=False`: for sources that must not need a collective."""
    exchange = Exchange(num_workers)

    def gather_of(worker: int) -> Callable[[Sequence[int]], list[list[int]]]:
        def gather(ints: Sequence[int]) -> list[list[int]]:
            if not may_ask:
                raise AssertionError("asked the other workers")
            return exchange.gather(worker, ints)

        return gather

    return [
        InputLayout(
            num_workers * replicas,
            tuple(range(worker * replicas, (worker + 1) * replicas)),
            num_workers,
            worker,
            (torch.device("cpu"),) * replicas,
            gather_of(worker),
        )
        for worker in range(num_workers)
    ]


def alone(replicas: int = 1) -> InputLayout:
    return layouts(1, replicas, may_ask=False)[0]


def on_workers(jobs: Iterable[InputLayout], fn: Callable[[InputLayout], T]) -> list[T]:
    """fn on every worker, each in its thread."""
    jobs = list(jobs)
    with ThreadPoolExecutor(len(jobs)) as pool:
        futures = [pool.submit(fn, layout) for layout in jobs]
        return [future.result(timeout=60) for future in futures]


def plain(batch: Any) -> list[list[Any]]:
    """Per local replica what the batch's first leaf holds, as lists."""
    first = leaves(batch)[0]
    assert type(first) is PerReplica
    return [list(v) if isinstance(v, (list, tuple)) else v.tolist() for v in first.values]


def epoch(dataset: Iterable[Any]) -> list[list[list[Any]]]:
    """Steps, local replicas, examples."""
    return [plain(batch) for batch in dataset]


def equal(one: Any, other: Any) -> bool:
    same: list[bool] = []

    def compare(a: PerReplica[Any], b: PerReplica[Any]) -> None:
        same.append(a.examples == b.examples)
        for x, y in zip(a.values, b.values, strict=True):
            if isinstance(x, torch.Tensor):
                same.append(x.dtype == y.dtype and torch.equal(x, y))
            else:
                same.append(x == y)

    map_structure(compare, one, other)
    return all(same)


class Counting(Dataset[Any]):
    """i -> (i as a float, i); notes what was asked for."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.asked: list[int] = []

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if not 0 <= index < self.length:
            raise IndexError(index)
        self.asked.append(index)
        return torch.tensor([float(index)]), index
