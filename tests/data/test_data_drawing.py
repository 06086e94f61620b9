"""Random numbers that datasets, samplers and iterables draw from the default generators."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from data_jobs import (
    alone,
    distribute_dataset,
    distribute_datasets_from_function,
    epoch,
    layouts,
    on_workers,
)
from fastdist.data import DistributedDataset
from fastdist.data.input_context import InputLayout
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, get_worker_info


class Drawing(Dataset[torch.Tensor]):
    """Examples that are drawn by all kinds of operations."""

    def __len__(self) -> int:
        return 22

    def __getitem__(self, index: int) -> torch.Tensor:
        drawn = [
            torch.randn(3),
            torch.rand(2, out=torch.empty(2)),
            torch.rand_like(torch.ones(2)),
            torch.randint(9, (2,)),
            torch.randperm(4),
            torch.empty(2).normal_(),
            F.dropout(torch.ones(8)),
            torch.distributions.Gamma(2.0, 1.0).sample((2,)),
            torch.multinomial(torch.ones(5), 2),
            torch.nn.init.xavier_uniform_(torch.empty(2, 2)).flatten(),
            torch.randn(2, generator=torch.Generator().manual_seed(index)),
            torch.empty(1, dtype=torch.int64).random_(9),
        ]
        return torch.cat([x.float() for x in drawn])


class AllGenerators(Dataset[float]):
    def __len__(self) -> int:
        return 22

    def __getitem__(self, index: int) -> float:
        return index + random.random() + float(np.random.rand()) + float(torch.rand(()))


def made(
    source: Any, layout: InputLayout | None = None, taken: int = 0, **options: Any
) -> DistributedDataset:
    """A dataset at a step of its second epoch."""
    dataset = distribute_dataset(
        source, layout or alone(), global_batch_size=4, shuffle=True, seed=3, **options
    )
    dataset.load_state_dict({**dataset.state_dict(), "epoch": 1, "step": taken})
    return dataset


def joined(dataset: Any) -> list[Any]:
    """All examples of the epoch; a training step draws after each batch."""
    examples = []
    for batch in dataset:
        torch.randn(100)
        examples += [example for value in batch.values for example in value.tolist()]
    return examples


@pytest.fixture(autouse=True)
def _the_default_generator_is_left_alone() -> Iterator[None]:
    torch.manual_seed(0)
    yield
    random_of_steps = torch.get_rng_state()
    steps = torch.Generator().manual_seed(0)
    for _ in range(100):
        if torch.equal(steps.get_state(), random_of_steps):
            return
        torch.randn(100, generator=steps)
    raise AssertionError("the source has drawn from the generator of the training steps")


def test_an_example_draws_by_its_position() -> None:
    expected = joined(made(Drawing(), prefetch=0))
    assert len({tuple(example) for example in expected}) == 22
    assert joined(made(Drawing())) == expected
    assert joined(made(Drawing(), alone(3))) == expected
    assert joined(made(Drawing(), taken=3)) == expected[12:]
    for dataset in (Drawing(), AllGenerators()):
        one = joined(made(dataset, num_workers=1))
        assert dataset.__class__ is AllGenerators or one == expected
        assert joined(made(dataset, num_workers=2, taken=3)) == one[12:]
    first = made(Drawing())
    first.set_epoch(0)
    assert joined(first) != expected


def test_all_workers_draw_alike() -> None:
    def attempt(layout: InputLayout) -> Any:
        return epoch(distribute_dataset(Drawing(), layout, global_batch_size=4))

    one, other = on_workers(layouts(2), attempt)
    both = [[*a[0], *b[0]] for a, b in zip(one, other, strict=True)]
    whole = epoch(distribute_dataset(Drawing(), alone(), global_batch_size=4))
    assert both == [step[0] for step in whole]


class Shuffled(IterableDataset[int]):
    def __len__(self) -> int:
        return 22

    def __iter__(self) -> Iterator[int]:
        for i in torch.randperm(22).tolist():
            yield i + 100 * int(torch.randint(9, ()))


def a_function(context: Any) -> Any:
    return DataLoader(Drawing(), batch_size=4, shuffle=True)


def a_function_with_processes(context: Any) -> Any:
    return DataLoader(Modes(), batch_size=4, shuffle=True, num_workers=1)


class Modes(Dataset[int]):
    """In a loader process no mode is active, which would slow it down."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        assert get_worker_info() is not None
        return index + 100 * torch._C._len_torch_dispatch_stack()


def sampled(**options: Any) -> DistributedDataset:
    sampler: Any = RandomSampler(range(22), replacement=True)
    return distribute_dataset(DataLoader(range(22), 4, sampler=sampler), alone(), **options)  # type: ignore[arg-type]


SOURCES: dict[str, Callable[..., DistributedDataset]] = {
    "sampler": sampled,
    "sampler, processes": lambda **options: sampled(num_workers=1, **options),
    "iterable": lambda **options: distribute_dataset(
        Shuffled(), alone(), global_batch_size=4, **options
    ),
    "function": lambda **options: distribute_datasets_from_function(a_function, alone(), **options),
    "function, processes": lambda **options: distribute_datasets_from_function(
        a_function_with_processes, alone(), **options
    ),
}


@pytest.mark.parametrize("name", SOURCES)
def test_an_epoch_repeats_what_it_draws(name: str) -> None:
    make = SOURCES[name]
    dataset = make(prefetch=0)
    first, second = joined(dataset), joined(dataset)
    assert first != second
    again = make()
    state = again.state_dict()
    assert [joined(again), joined(again)] == [first, second]
    resumed = make()
    resumed.load_state_dict({**state, "epoch": 1, "step": 1})
    assert joined(resumed) == second[4:]
    if name == "function, processes":
        assert sorted(first) == list(range(8))
