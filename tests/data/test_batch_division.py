"""Global batches are divided by the numbers that tf.distribute documents."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from data_jobs import (
    Counting,
    alone,
    distribute_dataset,
    distribute_datasets_from_function,
    epoch,
    layouts,
    on_workers,
    plain,
)
from fastdist.data import AutoShardPolicy, Files, InputContext
from fastdist.data.input_context import InputLayout
from fastdist.data.sharding import own_part
from fastdist.replicas.per_replica import leaves
from hypothesis import given, settings
from hypothesis import strategies as st

KINDS = {
    "array": torch.arange,
    "numpy": np.arange,
    "sequence": range,
    "list": lambda n: list(range(n)),
    "iterable": lambda n: map(int, range(n)),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("length", "batch", "replicas", "sizes"),
    [
        (100, 10, 2, [(5, 5)] * 10),
        (15, 4, 4, [(1, 1, 1, 1)] * 3 + [(1, 1, 1, 0)]),
        (7, 7, 4, [(2, 2, 2, 1)]),
        (2, 8, 4, [(1, 1, 0, 0)]),
        (5, 2, 1, [(2,), (2,), (1,)]),
        (0, 4, 2, []),
    ],
)
def test_sizes_of_the_parts(
    kind: str, length: int, batch: int, replicas: int, sizes: list[tuple[int, ...]]
) -> None:
    dataset = distribute_dataset(KINDS[kind](length), alone(replicas), global_batch_size=batch)
    seen = []
    for step, parts in enumerate(dataset):
        assert parts.examples == sizes[step]
        assert [len(part) for part in parts.values] == list(sizes[step])
        assert {part.dtype for part in parts.values} == {torch.int64}
        seen += [i for part in plain(parts) for i in part]
    assert seen == list(range(length))


@pytest.mark.parametrize(("workers", "replicas"), [(2, 2), (4, 1), (1, 4)])
def test_seven_on_four_replicas_wherever_they_are(workers: int, replicas: int) -> None:
    jobs = layouts(workers, replicas, may_ask=False)
    steps = [epoch(distribute_dataset(range(7), job, global_batch_size=7)) for job in jobs]
    assert [part for worker in steps for part in worker[0]] == [[0, 1], [2, 3], [4, 5], [6]]


POLICIES = {
    AutoShardPolicy.FILE: [[[0, 1], [2, 3], [4, 5]], [[6, 7], [8, 9], [10, 11]]],
    AutoShardPolicy.DATA: [[[0, 1], [4, 5], [8, 9]], [[2, 3], [6, 7], [10, 11]]],
    AutoShardPolicy.OFF: [[[i, i + 1] for i in range(0, 12, 2)]] * 2,
}


@pytest.mark.parametrize("policy", POLICIES)
def test_policies_on_files(policy: AutoShardPolicy) -> None:
    source = Files(["0", "6"], lambda path: range(int(path), int(path) + 6))

    def steps(layout: InputLayout) -> Any:
        dataset = distribute_dataset(source, layout, global_batch_size=4, auto_shard_policy=policy)
        return epoch(dataset)

    assert on_workers(layouts(2), steps) == [
        [[batch] for batch in worker] for worker in POLICIES[policy]
    ]


@pytest.mark.parametrize("policy", [AutoShardPolicy.DATA, AutoShardPolicy.OFF])
@pytest.mark.parametrize("kind", ["array", "sequence", "list"])
def test_policies_on_other_sources(policy: AutoShardPolicy, kind: str) -> None:
    def steps(layout: InputLayout) -> Any:
        source = KINDS[kind](12)
        return epoch(
            distribute_dataset(source, layout, global_batch_size=4, auto_shard_policy=policy)
        )

    assert on_workers(layouts(2), steps) == [
        [[batch] for batch in worker] for worker in POLICIES[policy]
    ]


@pytest.mark.parametrize(("files", "expected"), [(3, "FILE"), (2, "FILE"), (1, "DATA")])
def test_auto_is_by_files_where_there_are_enough(files: int, expected: str) -> None:
    source = Files([str(i) for i in range(files)], lambda path: [int(path)] * 2)

    def first(layout: InputLayout) -> Any:
        return epoch(distribute_dataset(source, layout, global_batch_size=2))[0]

    firsts = on_workers(layouts(2), first)
    assert firsts == ([[[0]], [[1]]] if expected == "FILE" else [[[0]], [[0]]])


def test_workers_whose_files_end_early_get_empty_batches() -> None:
    source = Files([4, 1, 1, 0], lambda n: [(float(n), "s")] * n)  # type: ignore[list-item]

    def steps(layout: InputLayout) -> Any:
        dataset = distribute_dataset(source, layout, global_batch_size=4)
        return [
            ([tuple(v.shape) for v in x.values], list(text.values), x.examples)
            for x, text in dataset
        ]

    first, second = on_workers(layouts(2, replicas=2), steps)  # files 4 and 1, 1 and 0
    assert [examples for _, _, examples in first] == [(1, 1, 1, 0), (1, 1, 0, 0), (1, 0, 0, 0)]
    assert [examples for *_, examples in second] == [examples for *_, examples in first]
    assert [shapes for shapes, *_ in second] == [[(1,), (0,)], [(0,), (0,)], [(0,), (0,)]]
    assert [texts for _, texts, _ in second] == [[["s"], []], [[], []], [[], []]]


@pytest.mark.parametrize("workers", [2, 3])
def test_a_worker_whose_files_are_empty_learns_the_shape_from_others(workers: int) -> None:
    source = Files([0] * (workers - 1) + [3], lambda n: torch.ones(n, 5))  # type: ignore[list-item]

    def shapes(layout: InputLayout) -> Any:
        dataset = distribute_dataset(source, layout, global_batch_size=workers)
        return [[tuple(value.shape) for value in batch.values] for batch in dataset]

    *empty, full = on_workers(layouts(workers), shapes)
    assert full == [[(1, 5)]] * 3
    assert all(worker == [[(0, 5)]] * 3 for worker in empty)


@pytest.mark.parametrize(
    ("source", "policy", "message"),
    [
        (Files(["a"], list), AutoShardPolicy.FILE, "1 files for 2 workers"),
        (range(4), AutoShardPolicy.FILE, "Files"),
        (range(4), "data", "AutoShardPolicy"),
        (range(4), AutoShardPolicy.OFF, "global_batch_size=1 for 2 replicas"),
    ],
)
def test_policies_that_do_not_fit(source: Any, policy: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        distribute_dataset(source, layouts(2)[0], global_batch_size=1, auto_shard_policy=policy)


# Row 18.


def test_function_is_called_once_per_worker_with_its_context() -> None:
    contexts: list[InputContext] = []

    def make(context: InputContext) -> list[torch.Tensor]:
        contexts.append(context)
        size = context.get_per_replica_batch_size(12)
        return [torch.full((size,), context.input_pipeline_id)] * 4

    def steps(layout: InputLayout) -> Any:
        dataset = distribute_datasets_from_function(make, layout)
        return [epoch(dataset) for _ in range(2)]

    assert on_workers(layouts(2, 2), steps) == [[[[[i] * 3] * 2] * 2] * 2 for i in range(2)]
    assert sorted(contexts, key=lambda c: c.input_pipeline_id) == [
        InputContext(2, 0, 4),
        InputContext(2, 1, 4),
    ]


@pytest.mark.parametrize("prefetch", [0, 2])
def test_function_with_uneven_counts(prefetch: int) -> None:
    def steps(layout: InputLayout) -> Any:
        batches = [{"x": torch.ones(size, 2)} for size in ([3, 2, 1], [4])[layout.worker]]
        dataset = distribute_datasets_from_function(lambda _: batches, layout, prefetch=prefetch)
        return [
            (batch["x"].examples, [tuple(value.shape) for value in batch["x"].values])
            for batch in dataset
        ]

    assert on_workers(layouts(2, 2), steps) == [
        [((3, 2, 4, 0), [(3, 2), (2, 2)]), ((1, 0, 0, 0), [(1, 2), (0, 2)])],
        [((3, 2, 4, 0), [(4, 2), (0, 2)]), ((1, 0, 0, 0), [(0, 2), (0, 2)])],
    ]


def test_a_function_without_any_batch_on_one_worker_is_an_error_on_all() -> None:
    def attempt(layout: InputLayout) -> str:
        batches = [torch.ones(1)] * layout.worker
        dataset = distribute_datasets_from_function(lambda _: batches, layout)
        with pytest.raises(ValueError, match=r"workers \[0\] is empty") as caught:
            next(iter(dataset))
        return str(caught.value)

    on_workers(layouts(2), attempt)


@pytest.mark.parametrize(("batch", "replicas", "each"), [(12, 4, 3), (4, 4, 1), (7, 1, 7)])
def test_per_replica_batch_size(batch: int, replicas: int, each: int) -> None:
    assert InputContext(1, 0, replicas).get_per_replica_batch_size(batch) == each


def test_per_replica_batch_size_that_does_not_divide() -> None:
    with pytest.raises(ValueError, match=r"7 examples .* 4 replicas"):
        InputContext(2, 0, 4).get_per_replica_batch_size(7)


@pytest.mark.parametrize("made", [3, None])
def test_a_function_must_return_an_iterable(made: Any) -> None:
    with pytest.raises(TypeError, match="iterable of per-replica batches"):
        distribute_datasets_from_function(lambda _: made, alone())


# Properties.

counts = st.integers(0, 60)
small = st.integers(1, 4)


@given(count=st.integers(0, 500), parts=st.integers(1, 40))
def test_sizes_of_parts(count: int, parts: int) -> None:
    sizes = own_part(parts, range(parts), count).sizes
    assert len(sizes) == parts
    assert sum(sizes) == count
    assert max(sizes) - min(sizes) <= 1
    assert list(sizes) == sorted(sizes, reverse=True)


@given(count=counts, workers=small, replicas=small)
def test_the_workers_cuts_are_the_whole_batch(count: int, workers: int, replicas: int) -> None:
    at = 0
    for worker in range(workers):
        local = range(worker * replicas, (worker + 1) * replicas)
        cut = own_part(workers * replicas, local, count)
        assert (cut.start, cut.stop - cut.start) == (at, sum(cut.sizes))
        assert cut.sizes == cut.examples[local.start : local.stop]
        at = cut.stop
    assert at == count


@settings(deadline=None, max_examples=60)
@given(
    length=counts,
    batch=st.integers(1, 12),
    workers=small,
    replicas=small,
    shuffle=st.booleans(),
    drop=st.booleans(),
    kind=st.sampled_from(["array", "sequence", "iterable"]),
)
def test_every_example_once_in_the_same_order_for_all_jobs(
    length: int, batch: int, workers: int, replicas: int, shuffle: bool, drop: bool, kind: str
) -> None:
    shuffle = shuffle and kind != "iterable"

    def steps(layout: InputLayout) -> Any:
        dataset = distribute_dataset(
            KINDS[kind](length),
            layout,
            global_batch_size=batch,
            shuffle=shuffle,
            seed=3,
            drop_remainder=drop,
            prefetch=0,
        )
        return [(plain(parts), leaves(parts)[0].examples) for parts in dataset]

    one = [parts[0] for parts, _ in steps(alone())]
    per_worker = on_workers(layouts(workers, replicas), steps)
    joined = []
    for step in zip(*per_worker, strict=True):
        parts = [part for worker, _ in step for part in worker]
        assert {examples for _, examples in step} == {tuple(map(len, parts))}
        assert max(map(len, parts)) - min(map(len, parts)) <= 1
        joined.append([i for part in parts for i in part])
    assert joined == one
    seen = [i for step in joined for i in step]
    kept = length - length % batch if drop else length
    assert len(seen) == len({*seen}) == kept
    if not shuffle:
        assert seen == list(range(kept))


@settings(deadline=None, max_examples=40)
@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(any),
    batch=st.integers(4, 9),
    workers=st.integers(1, 3),
)
def test_files_give_every_example_once_and_all_workers_end_together(
    lengths: list[int], batch: int, workers: int
) -> None:
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    source = Files(
        [str(i) for i in range(len(lengths))],
        lambda path: range(starts[int(path)], starts[int(path)] + lengths[int(path)]),
    )

    def steps(layout: InputLayout) -> Any:
        return epoch(distribute_dataset(source, layout, global_batch_size=batch))

    per_worker = on_workers(layouts(workers), steps)
    assert len({len(worker) for worker in per_worker}) == 1
    seen = [i for worker in per_worker for step in worker for part in step for i in part]
    assert sorted(seen) == list(range(sum(lengths)))


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("shuffle", [False, True])
def test_a_worker_loads_only_what_its_replicas_get(workers: int, shuffle: bool) -> None:
    asked = []
    for layout in layouts(workers, 2, may_ask=False):
        source = Counting(48)
        dataset = distribute_dataset(source, layout, global_batch_size=12, shuffle=shuffle)
        got = [i for _, y in dataset for value in y.values for i in value.tolist()]
        compared = source.asked.copy()  # the first examples of batches 0, 1 and 2
        for i in got:
            compared.remove(i)
        assert len(compared) == (0 if layout.worker == 0 else 3)
        assert len(got) == 48 // workers
        asked += got
    assert sorted(asked) == list(range(48))
