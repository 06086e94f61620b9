"""DataLoaders as sources, loader processes, samplers; and workers that do not read the same."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import fastdist as fd
import numpy as np
import pytest
import torch
from data_jobs import Counting, alone, distribute_dataset, equal, layouts, on_workers
from fastdist.data import AutoShardPolicy, Files
from fastdist.data.input_context import InputLayout
from fastdist.errors import FastdistError
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
)
from torch.utils.data.distributed import DistributedSampler

X, Y = torch.arange(20.0).reshape(10, 2), np.arange(10)


def numbers(dataset: Any) -> list[list[int]]:
    """Per step the second leaf of all replicas, joined."""
    return [[i for value in batch[1].values for i in value.tolist()] for batch in dataset]


def test_a_loader_brings_its_arguments() -> None:
    loader = DataLoader(Counting(10), batch_size=4, drop_last=True)
    dataset = distribute_dataset(loader, alone(2))
    assert len(dataset) == 2
    assert numbers(dataset) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert numbers(distribute_dataset(loader, alone(2), global_batch_size=4)) == numbers(dataset)
    unsized = DataLoader(Counting(10), drop_last=True)  # of batch size 1, by default
    assert numbers(distribute_dataset(unsized, alone(2), global_batch_size=5)) == [
        [0, 1, 2, 3, 4],
        [5, 6, 7, 8, 9],
    ]


def test_a_random_sampler_becomes_a_seeded_shuffle() -> None:
    loader = DataLoader(Counting(20), batch_size=8, shuffle=True)
    direct = distribute_dataset(Counting(20), alone(), global_batch_size=8, shuffle=True, seed=5)
    expected = numbers(direct)
    for replicas in (1, 3):
        assert numbers(distribute_dataset(loader, alone(replicas), seed=5)) == expected
    assert numbers(distribute_dataset(loader, alone(), seed=6)) != expected


def as_dict(examples: list[Any]) -> dict[str, Any]:
    return {"n": len(examples), "y": torch.tensor([y for _, y in examples])}


@pytest.mark.parametrize("loaders", [0, 2])
def test_custom_collate_of_a_loader(loaders: int) -> None:
    loader = DataLoader(Counting(7), batch_size=4, collate_fn=as_dict, num_workers=loaders)
    batches = list(distribute_dataset(loader, alone(2)))
    assert [batch["n"].values for batch in batches] == [(2, 2), (2, 1)]
    assert batches[1]["y"].values[1].tolist() == [6]


@pytest.mark.parametrize("source", ["examples", "iterable", "files"])
def test_loader_processes_give_what_none_give(source: str) -> None:
    def made(loaders: int) -> Any:
        if source == "examples":
            chosen: Any = Counting(13)
        elif source == "files":
            chosen = Files(["0", "6"], read_spread)
        else:
            chosen = Spread(0, 13)
        return distribute_dataset(
            chosen,
            alone(2),
            global_batch_size=4,
            shuffle=source == "examples",
            num_workers=loaders,
        )

    without, with_one = list(made(0)), list(made(1))
    assert len(without) == len(with_one)
    assert all(equal(a, b) for a, b in zip(without, with_one, strict=True))
    seen = [i for step in numbers(made(2)) for i in step]
    assert sorted(seen) == sorted(i for step in numbers(without) for i in step)


class Spread(IterableDataset[Any]):
    """(i as a float, i) for a range, shared out among loader processes."""

    def __init__(self, start: int, stop: int) -> None:
        self.range = range(start, stop)

    def all(self) -> Iterator[Any]:
        return ((torch.tensor([float(i)]), i) for i in self.range)

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        mine = self.range if info is None else self.range[info.id :: info.num_workers]
        return ((torch.tensor([float(i)]), i) for i in mine)


def read_spread(path: str) -> Iterator[Any]:
    return Spread(int(path), int(path) + 6).all()


def test_an_iterable_dataset_in_a_loader_gives_the_loaders_batches() -> None:
    loader = DataLoader(Spread(0, 11), batch_size=4, num_workers=2)
    assert numbers(distribute_dataset(loader, alone(3))) == [b[1].tolist() for b in loader]


def test_a_tensor_dataset_is_sliced() -> None:
    loader = DataLoader(TensorDataset(X, torch.from_numpy(Y)), batch_size=4)
    batches = list(distribute_dataset(loader, alone()))
    assert [batch[1].values[0].tolist() for batch in batches] == [b[1].tolist() for b in loader]
    assert isinstance(batches[0], tuple)


class Batches(IterableDataset[Any]):
    """Global batches of 5, 5 and 3 examples, as WebDataset makes them."""

    def __iter__(self) -> Iterator[Any]:
        for start in (0, 5, 10):
            y = torch.arange(start, min(start + 5, 13))
            yield {"x": y[:, None] * 2.0, "y": y, "key": [f"k{i}" for i in y], "epoch": 7}


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_loader_without_batching_gives_global_batches(num_workers: int) -> None:
    loader = DataLoader(Batches(), batch_size=None, num_workers=num_workers)
    (whole,) = [list(distribute_dataset(loader, alone()))]
    assert [batch["y"].values[0].tolist() for batch in whole] == [
        list(range(5)),
        list(range(5, 10)),
        [10, 11, 12],
    ]
    for batch in distribute_dataset(loader, alone(4)):
        y = torch.cat(batch["y"].values)
        assert batch["y"].examples in ((2, 1, 1, 1), (1, 1, 1, 0))
        assert torch.equal(torch.cat(batch["x"].values).squeeze(1), 2.0 * y)
        assert [k for part in batch["key"].values for k in part] == [f"k{i}" for i in y]
        assert batch["x"].values[3].shape[1:] == (1,)
        assert batch["epoch"].values == (7,) * 4


class PackedBatches(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield {"y": torch.arange(3), "x": packed([(0, y) for y in range(3)])}


def test_a_packed_batch_is_not_cut() -> None:
    loader = DataLoader(PackedBatches(), batch_size=None)
    with pytest.raises(ValueError, match="PackedSequence cannot be divided"):
        list(distribute_dataset(loader, alone(2)))


def test_global_batches_on_workers() -> None:
    def attempt(layout: InputLayout) -> list[list[int]]:
        loader = DataLoader(Batches(), batch_size=None)
        return [b["y"].values[0].tolist() for b in distribute_dataset(loader, layout)]

    one, other = on_workers(layouts(2), attempt)
    assert one == [[0, 1, 2], [5, 6, 7], [10, 11]]
    assert other == [[3, 4], [8, 9], [12]]


def test_batches_that_are_taken_for_examples() -> None:
    loader = DataLoader(Batches(), batch_size=None)
    with pytest.raises(ValueError, match=r"items of 5 rows.*leave out global_batch_size"):
        list(distribute_dataset(loader, alone(2), global_batch_size=5))


def packed(examples: list[Any]) -> Any:
    return pack_sequence([torch.arange(1.0, 2 + y % 5) for _, y in examples], enforce_sorted=False)


def test_packed_sequences() -> None:
    loader = DataLoader(Counting(9), batch_size=4, collate_fn=packed)
    total = sum(batch.data.sum() for batch in loader)
    whole = distribute_dataset(loader, alone())
    assert sum(batch.values[0].data.sum() for batch in whole) == total
    first = next(iter(distribute_dataset(loader, alone(2))))
    assert [len(part.batch_sizes) for part in first.values] == [2, 4]
    with pytest.raises(ValueError, match=r"PackedSequence cannot be empty.*drop_remainder=True"):
        list(distribute_dataset(loader, alone(2)))


def test_packed_sequences_of_workers_with_their_own_data() -> None:
    def attempt(layout: InputLayout, longer: int) -> list[int]:
        examples = Counting(8 + 4 * (layout.worker < longer))
        policy = AutoShardPolicy.OFF
        batches = distribute_dataset(
            examples, layout, global_batch_size=4, auto_shard_policy=policy, collate_fn=packed
        )
        return [len(batch.values[0].sorted_indices) for batch in batches]

    assert on_workers(layouts(2), lambda layout: attempt(layout, 0)) == [[2] * 4] * 2

    def fail(layout: InputLayout) -> BaseException:
        with pytest.raises(ValueError, match="empty") as caught:
            attempt(layout, 1)
        return caught.value

    longer, ended = on_workers(layouts(2), fail)
    assert "the data of workers [1] is empty while other workers have examples" in str(longer)
    assert "a PackedSequence cannot be empty" in str(ended)


ARRAY = torch.arange(12.0)
SHUFFLED = Counting(12)


@pytest.mark.parametrize(
    ("make", "warns"),
    [
        (lambda epoch: {"source": torch.arange(12.0)}, True),
        (lambda epoch: {"source": SHUFFLED}, True),
        (lambda epoch: {"source": DataLoader(SHUFFLED, 4, shuffle=True)}, True),
        (lambda epoch: {"source": ARRAY[:0]}, True),
        (lambda epoch: {"source": ARRAY, "seed": epoch}, False),
        (lambda epoch: {"source": ARRAY + epoch}, False),  # folds
        (lambda epoch: {"source": Counting(12)}, False),
    ],
)
def test_a_dataset_made_anew_for_every_epoch_warns(make: Any, warns: bool) -> None:
    def train(strategy: fd.Strategy, number: int, epochs: int) -> None:
        given = make(number)
        if not isinstance(given["source"], DataLoader):
            given |= {"global_batch_size": 4, "shuffle": True}
        dataset = strategy.distribute_dataset(given.pop("source"), **given)
        for _ in range(epochs):
            list(dataset)

    strategy = fd.OneDeviceStrategy("cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(strategy, 0, 3)
        train(strategy, 0, 3)  # another training
        train(fd.OneDeviceStrategy("cpu"), 0, 1)
        train(strategy, 0, 1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(strategy, 1, 1)
    assert [w.filename for w in caught] == [__file__] * warns


class Epochs(SequentialSampler):
    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        order = list(super().__iter__())
        return iter(order[self.epoch :] + order[: self.epoch])


@pytest.mark.parametrize("dataset", [Counting(6), TensorDataset(X[:6], torch.arange(6))])
def test_custom_sampler_in_every_epoch(dataset: Any) -> None:
    def steps(layout: InputLayout) -> Any:
        loader = DataLoader(dataset, batch_size=4, sampler=Epochs(dataset))
        made = distribute_dataset(loader, layout)
        return [numbers(made), numbers(made)]

    expected = [[[0, 1, 2, 3], [4, 5]], [[1, 2, 3, 4], [5, 0]]]
    assert steps(alone(2)) == expected
    first, second = on_workers(layouts(2), steps)
    for epoch_, steps_ in enumerate(expected):
        for step, whole in enumerate(steps_):
            assert first[epoch_][step] + second[epoch_][step] == whole


@pytest.mark.parametrize("standard", [True, False])
def test_batch_samplers(standard: bool) -> None:
    data = Counting(7)
    batches: Any = BatchSampler(SequentialSampler(data), 3, drop_last=False)
    loader = DataLoader(data, batch_sampler=batches if standard else list(batches))
    made = distribute_dataset(loader, alone(2))
    assert len(made) == 3
    assert numbers(made) == [[0, 1, 2], [3, 4, 5], [6]]


def test_samplers_with_replacement_are_the_users() -> None:
    generator = torch.Generator().manual_seed(0)
    sampler = WeightedRandomSampler([0.0, 1.0, 0.0], 5, generator=generator)
    loader = DataLoader(Counting(3), batch_size=2, sampler=sampler)
    assert numbers(distribute_dataset(loader, alone())) == [[1, 1], [1, 1], [1]]
    replacing = RandomSampler(Counting(3), replacement=True, num_samples=50)
    steps = numbers(distribute_dataset(DataLoader(Counting(3), 50, sampler=replacing), alone()))
    assert len(steps[0]) == 50


def test_workers_that_draw_different_samples_all_raise() -> None:
    def attempt(layout: InputLayout) -> None:
        sampler = Subset(Counting(9), [1, 3, 5] if layout.worker else [1, 3, 7]).indices
        loader = DataLoader(Counting(9), batch_size=2, sampler=sampler)
        steps = iter(distribute_dataset(loader, layout))
        next(steps)
        with pytest.raises(ValueError, match=r"different data in step 1.*seeded"):
            next(steps)

    on_workers(layouts(2), attempt)


def texts(shard: int) -> Iterator[Any]:
    yield from ({"text": f"{shard} {i}", "score": 0.5} for i in range(8))


def token_ids(shard: int) -> Iterator[Any]:
    yield from ((torch.arange(i + shard, i + shard + 5), torch.zeros(2)) for i in range(8))


def labels(shard: int) -> Iterator[Any]:
    yield from ((np.zeros(3, np.float32), i + 8 * shard) for i in range(8))


def floats(shard: int) -> Iterator[Any]:
    yield from (torch.full((2, 2), i + 0.5 * shard, dtype=torch.bfloat16) for i in range(8))


def shuffled(shard: int) -> Iterator[Any]:
    yield from np.random.default_rng(shard).permutation(64)[:8]


class ByRank(IterableDataset[Any]):
    def __init__(self, read: Any, rank: int) -> None:
        self.read = read
        self.rank = rank

    def __iter__(self) -> Iterator[Any]:
        return iter(self.read(self.rank))


@pytest.mark.parametrize("read", [texts, token_ids, labels, floats, shuffled])
@pytest.mark.parametrize("processes", [False, True])
def test_streams_that_divide_themselves_by_rank(read: Any, processes: bool) -> None:
    """Each worker takes its part of every batch, so half of the examples would be lost."""

    def attempt(layout: InputLayout) -> None:
        # Of the first worker alone: threads that fork at once are refused by some libraries.
        num_workers = int(processes and layout.worker == 0)
        loader = DataLoader(ByRank(read, layout.worker), batch_size=4, num_workers=num_workers)
        with pytest.raises(ValueError, match=r"different data in step 0 .*split_by_node"):
            list(distribute_dataset(loader, layout))

    on_workers(layouts(2), attempt)


def augmented(seed: int) -> Iterator[Any]:
    draw = np.random.default_rng(seed)
    for i in range(8):
        image = draw.integers(0, 256, (4, 4), dtype=np.uint8)
        yield {"image": image, "noise": torch.from_numpy(draw.random(2)), "label": i}


def test_augmentations_may_differ_between_workers() -> None:
    def attempt(layout: InputLayout) -> list[int]:
        stream = ByRank(augmented, layout.worker)
        steps = distribute_dataset(stream, layout, global_batch_size=4)
        return [i for step in steps for i in step["label"].values[0].tolist()]

    assert on_workers(layouts(2), attempt) == [[0, 1, 4, 5], [2, 3, 6, 7]]


def test_workers_whose_iterables_differ_in_length_all_raise() -> None:
    def attempt(layout: InputLayout) -> None:
        source = (i for i in range(4 + layout.worker))
        with pytest.raises(ValueError, match="0 on worker 0, 1 on worker 1"):
            list(distribute_dataset(source, layout, global_batch_size=2))

    on_workers(layouts(2), attempt)


def failing(paths: int) -> Iterator[int]:
    yield 1
    raise OSError(f"cannot read {paths}")


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_worker_that_cannot_read_is_an_error_on_all(prefetch: int) -> None:
    source = Files([0, 1], lambda i: failing(i) if i else range(9))  # type: ignore[list-item]

    def attempt(layout: InputLayout) -> BaseException:
        made = distribute_dataset(source, layout, global_batch_size=2, prefetch=prefetch)
        with pytest.raises((OSError, FastdistError)) as caught:
            list(made)
        return caught.value

    healthy, broken = on_workers(layouts(2), attempt)
    assert isinstance(broken, OSError)
    assert isinstance(healthy, FastdistError)
    assert healthy.ranks == (1,)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ({"sampler": DistributedSampler(range(4), 2, 0)}, {}, "shuffle=True"),  # type: ignore[arg-type]
        ({"sampler": [1, 2]}, {"shuffle": True}, "contradicts"),
        ({"batch_size": 2}, {"global_batch_size": 4}, "batch_size=2, which becomes the global"),
        ({"batch_sampler": [[1, 2]]}, {"global_batch_size": 2}, "batch_sampler"),
        ({"batch_size": None, "collate_fn": as_dict}, {"global_batch_size": 2}, "single examples"),
    ],
)
def test_loaders_that_contradict(arguments: Any, options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        distribute_dataset(DataLoader(Counting(4), **arguments), alone(), **options)


def test_off_needs_batches_of_its_own_size() -> None:
    loader = DataLoader(Counting(4), batch_sampler=[[0, 1], [2, 3]])
    with pytest.raises(ValueError, match="OFF needs a batch size"):
        distribute_dataset(loader, layouts(2)[0], auto_shard_policy=AutoShardPolicy.OFF)
