"""Epochs, lengths, and going on in the middle of one."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from data_jobs import (
    Counting,
    alone,
    distribute_dataset,
    distribute_datasets_from_function,
    epoch,
    equal,
    layouts,
    on_workers,
)
from fastdist.data import AutoShardPolicy, DistributedDataset, Files
from fastdist.data.input_context import InputLayout
from torch.utils.data import DataLoader, SequentialSampler

Make = Callable[[InputLayout], DistributedDataset]


def shuffled(source: Any, **options: Any) -> Make:
    def make(layout: InputLayout) -> DistributedDataset:
        return distribute_dataset(
            source, layout, global_batch_size=4, shuffle=True, seed=1, **options
        )

    return make


def in_order(source: Any, **options: Any) -> Make:
    return lambda layout: distribute_dataset(source, layout, global_batch_size=4, **options)


SOURCES: dict[str, Make] = {
    "arrays": shuffled((torch.arange(18), torch.ones(18))),
    "examples": shuffled(Counting(18)),
    "examples, no prefetch": shuffled(Counting(18), prefetch=0),
    "examples, much prefetch": shuffled(Counting(18), prefetch=50),
    "examples, processes": shuffled(Counting(18), num_workers=2),
    "iterable": in_order({i: i for i in range(18)}.keys()),
    "files": in_order(Files(["0", "9"], lambda p: range(int(p), int(p) + 9))),
    "files, processes": in_order(
        Files(["0", "9"], lambda p: range(int(p), int(p) + 9)), num_workers=2
    ),
    "sampler": lambda layout: distribute_dataset(
        DataLoader(Counting(18), 4, sampler=SequentialSampler(range(18))), layout
    ),
    "function": lambda layout: distribute_datasets_from_function(
        lambda _: torch.arange(18).split(2), layout
    ),
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] if "processes" in name else [])
        for name in SOURCES
    ],
)
def test_resume_after_every_step(name: str) -> None:
    make = SOURCES[name]
    dataset = make(alone(2))
    epochs = [list(dataset) for _ in range(3)]
    for taken in range(len(epochs[1]) + 1):
        before = make(alone(2))
        list(before)
        steps = iter(before)
        for batch in epochs[1][:taken]:
            assert equal(next(steps), batch)
        state = before.state_dict()
        del steps
        after = make(alone(2))
        after.load_state_dict(state)
        for expected in (epochs[1][taken:], epochs[2]):
            got = list(after)
            assert len(got) == len(expected)
            assert all(map(equal, got, expected))


@pytest.mark.parametrize("policy", [AutoShardPolicy.FILE, AutoShardPolicy.OFF])
@pytest.mark.parametrize("taken", range(5))
def test_resume_where_workers_end_at_different_times(policy: AutoShardPolicy, taken: int) -> None:
    source = Files([0, 1], lambda i: [torch.tensor(float(i))] * (7 - 4 * i))  # type: ignore[list-item]

    def steps(layout: InputLayout) -> bool:
        def made() -> DistributedDataset:
            return distribute_dataset(source, layout, global_batch_size=4, auto_shard_policy=policy)

        whole = list(made())
        before = made()
        begun = iter(before)
        list(itertools.islice(begun, taken))
        after = made()
        after.load_state_dict(before.state_dict())
        rest = list(after)
        return len(rest) == len(whole) - taken and all(map(equal, rest, whole[taken:]))

    assert on_workers(layouts(2), steps) == [True, True]


def test_resume_on_another_number_of_replicas() -> None:
    make = SOURCES["arrays"]
    one, four = make(alone(1)), make(alone(4))
    steps = iter(one)
    next(steps)
    four.load_state_dict(one.state_dict())
    joined = [[i for part in step for i in part] for step in epoch(four)]
    assert joined == [step[0] for step in epoch(steps)]


def test_every_epoch_has_its_order_and_set_epoch_chooses() -> None:
    make = SOURCES["arrays"]
    dataset = make(alone())
    first, second = epoch(dataset), epoch(dataset)
    assert first != second
    assert epoch(make(alone())) == first
    dataset.set_epoch(1)
    assert epoch(dataset) == second
    dataset.set_epoch(0)
    assert epoch(dataset) == first


def test_leaving_early_begins_the_next_epoch() -> None:
    make = SOURCES["examples"]
    dataset = make(alone())
    second = make(alone())
    second.set_epoch(1)
    steps = iter(dataset)
    next(steps)
    assert dataset.state_dict()["step"] == 1
    next(steps)
    del steps
    assert epoch(dataset) == epoch(second)


@pytest.mark.parametrize("name", ["arrays", "examples", "iterable", "files", "function"])
@pytest.mark.parametrize("count", [2, 5])
@pytest.mark.parametrize("save_first", [False, True])
def test_an_epoch_left_and_saved_goes_on_here_as_in_a_restored_job(
    name: str, count: int, save_first: bool
) -> None:
    make = SOURCES[name]
    whole, dataset, restored = (make(alone()) for _ in range(3))
    first, second = epoch(whole), epoch(whole)
    length = len(first)
    state = {}
    for _ in range(length // count):  # the job's epochs have `count` batches
        for i, _ in enumerate(dataset):
            if save_first:
                state = dataset.state_dict()
            if i == count - 1:
                break
        if not save_first:
            state = dataset.state_dict()
    restored.load_state_dict(state)
    if rest := first[length // count * count :]:
        assert epoch(dataset) == epoch(restored) == rest
    elif save_first:  # nobody knew that the loop would be left
        assert epoch(restored) == []
    assert epoch(dataset) == epoch(restored) == second


def test_set_epoch_after_an_epoch_left_and_saved() -> None:
    make = SOURCES["arrays"]
    for chosen, count in ((1, 2), (2, 5)):
        job, restored = make(alone()), make(alone())
        job.set_epoch(1)
        list(itertools.islice(job, 3))
        restored.load_state_dict(job.state_dict())
        job.set_epoch(chosen)
        restored.set_epoch(chosen)
        steps = epoch(job)
        assert len(steps) == count
        assert epoch(restored) == steps


def test_set_epoch_keeps_the_position_that_was_loaded() -> None:
    make = SOURCES["arrays"]
    saved = make(alone())
    steps = iter(saved)
    next(steps)
    state = saved.state_dict()
    for chosen, count in ((0, 4), (1, 5)):
        resumed = make(alone())
        resumed.load_state_dict(state)
        resumed.set_epoch(chosen)
        assert len(list(resumed)) == count
    with pytest.raises(ValueError, match="negative"):
        saved.set_epoch(-1)


def test_an_old_iterator_does_not_move_the_position_of_a_new_one() -> None:
    dataset = SOURCES["arrays"](alone())
    old = iter(dataset)
    next(old)
    new = iter(dataset)
    next(old)
    list(old)
    assert dataset.state_dict() == {**dataset.state_dict(), "epoch": 1, "step": 0}
    assert len(list(new)) == 5
    assert dataset.state_dict()["epoch"] == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"global_batch_size": 5}, "global_batch_size=4, this dataset has global_batch_size=5"),
        ({"seed": 2}, "seed=1"),
        ({"shuffle": False}, "shuffle=True"),
    ],
)
def test_a_state_of_another_dataset(options: Any, message: str) -> None:
    state = SOURCES["arrays"](alone()).state_dict()
    other = distribute_dataset(
        torch.arange(18),
        alone(),
        **{"global_batch_size": 4, "shuffle": True, "seed": 1, **options},
    )
    with pytest.raises(ValueError, match=message):
        other.load_state_dict(state)


@pytest.mark.parametrize("state", [{}, {"epoch": 0}, {"epoch": 0, "step": 0, "other": 1}])
def test_what_is_no_state(state: Any) -> None:
    with pytest.raises(ValueError, match="expected a state with"):
        SOURCES["arrays"](alone()).load_state_dict(state)


@pytest.mark.parametrize(
    ("name", "length"),
    [
        ("arrays", 5),
        ("examples", 5),
        ("examples, processes", 5),
        ("iterable", 5),
        ("sampler", 5),
        ("function", 5),
        ("files", None),
    ],
)
def test_length(name: str, length: int | None) -> None:
    dataset = SOURCES[name](alone(2))
    if length is None:
        with pytest.raises(TypeError, match="not known"):
            len(dataset)
    else:
        assert len(dataset) == length == len(list(dataset))


def test_length_where_workers_have_their_own() -> None:
    made = distribute_dataset(
        range(8), layouts(2)[0], global_batch_size=4, auto_shard_policy=AutoShardPolicy.OFF
    )
    with pytest.raises(TypeError, match="not known"):
        len(made)
    assert len(distribute_dataset(range(9), alone(), global_batch_size=4, drop_remainder=True)) == 2


def test_under_off_each_worker_has_its_own_order() -> None:
    def order(layout: InputLayout) -> Any:
        return epoch(
            distribute_dataset(
                torch.arange(32),
                layout,
                global_batch_size=32,
                shuffle=True,
                auto_shard_policy=AutoShardPolicy.OFF,
            )
        )

    one, other = on_workers(layouts(2), order)
    assert one != other
    assert sorted(i for step in one for part in step for i in part) == list(range(32))
