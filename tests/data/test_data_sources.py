"""Sources of data that can be distributed, and those that are refused."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from data_jobs import Counting, alone, distribute_dataset, distribute_datasets_from_function, epoch
from fastdist.data import Files
from fastdist.replicas.per_replica import PerReplica


@dataclasses.dataclass(frozen=True)
class Pair:
    x: Any
    y: Any


class Named(NamedTuple):
    x: Any
    y: Any


X, Y = torch.arange(20.0).reshape(10, 2), np.arange(10)


def halves(leaf: Any, first: Any, second: Any) -> bool:
    assert type(leaf) is PerReplica
    assert leaf.examples == (2, 2)
    return all(
        torch.equal(a, torch.as_tensor(b))
        for a, b in zip(leaf.values, (first, second), strict=True)
    )


@pytest.mark.parametrize(
    ("make", "take"),
    [
        (lambda x, y: (x, y), lambda b: (b[0], b[1])),
        (lambda x, y: {"x": x, "y": y}, lambda b: (b["x"], b["y"])),
        (Named, lambda b: (b.x, b.y)),
        (Pair, lambda b: (b.x, b.y)),
        (lambda x, y: ({"x": x}, [Pair(y, y)]), lambda b: (b[0]["x"], b[1][0].y)),
    ],
    ids=["tuple", "dict", "namedtuple", "dataclass", "nested"],
)
@pytest.mark.parametrize("by_example", [False, True])
def test_structures(make: Any, take: Any, by_example: bool) -> None:
    source = [make(x, y) for x, y in zip(X, Y, strict=True)] if by_example else make(X, Y)
    batch = next(iter(distribute_dataset(source, alone(2), global_batch_size=4)))
    assert type(batch) is type(make(X, Y))
    x, y = take(batch)
    assert halves(x, X[:2], X[2:4])
    assert halves(y, Y[:2], Y[2:4])


def test_one_array_gives_one_value() -> None:
    batch = next(iter(distribute_dataset(X, alone(2), global_batch_size=4)))
    assert halves(batch, X[:2], X[2:4])


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=">i4"),
        np.array(list("abcdef")),
        np.arange(6)[::-1],
        np.broadcast_to(np.float32(1), (6, 2)),
        np.arange(6, dtype=np.float16),
    ],
    ids=["big endian", "strings", "reversed", "read only", "half"],
)
def test_arrays_that_torch_cannot_view(array: np.ndarray[Any, Any], shuffle: bool) -> None:
    dataset = distribute_dataset(array, alone(), global_batch_size=4, shuffle=shuffle)
    rows = np.concatenate([np.asarray(batch.values[0]) for batch in dataset])
    assert sorted(rows.tolist()) == sorted(array.tolist())
    assert shuffle or rows.tolist() == array.tolist()


@pytest.mark.parametrize("shuffle", [False, True])
def test_changing_a_batch_leaves_the_source_alone(shuffle: bool) -> None:
    source = (torch.ones(4), np.ones(4))
    for batch in distribute_dataset(source, alone(), global_batch_size=2, shuffle=shuffle):
        for leaf in batch:
            leaf.values[0].zero_()
    assert source[0].sum() == source[1].sum() == 4


def test_no_gradients_flow_into_the_data() -> None:
    source = torch.ones(4, requires_grad=True)
    batch = next(iter(distribute_dataset(source, alone(), global_batch_size=2)))
    assert not batch.values[0].requires_grad


def test_strings_and_empty_replicas() -> None:
    examples = [(f"s{i}", torch.ones(3), {"n": i}) for i in range(3)]
    text, x, n = next(iter(distribute_dataset(examples, alone(4), global_batch_size=4)))
    assert text.values == (["s0"], ["s1"], ["s2"], [])
    assert [tuple(v.shape) for v in x.values] == [(1, 3)] * 3 + [(0, 3)]
    assert n["n"].values[3].dtype == torch.int64
    assert text.examples == x.examples == n["n"].examples == (1, 1, 1, 0)


@pytest.mark.parametrize("count", [3, 4, 5, 6, 7])
def test_columns_of_a_custom_collate_are_leaves(count: int) -> None:
    images = [(torch.ones(3, i + 1, 2), {"id": i}) for i in range(count)]

    def collate(examples: list[Any]) -> Any:
        return tuple(zip(*examples, strict=True))

    dataset = distribute_dataset(images, alone(3), global_batch_size=count, collate_fn=collate)
    batch = next(iter(dataset))
    seen = 0
    for replica in range(3):
        mine, targets = (
            leaf.values[replica] if type(leaf) is PerReplica else [p.values[replica] for p in leaf]
            for leaf in batch
        )
        for image, target in zip(mine, targets, strict=True):
            own = target["id"]
            own = own.values[replica] if type(own) is PerReplica else own
            assert (image.shape[1], own) == (seen + 1, seen)
            seen += 1
    assert seen == count


def test_structures_whose_length_is_that_of_a_column() -> None:
    examples = [(f"a{i}", f"b{i}") for i in range(4)]
    batch = next(iter(distribute_dataset(examples, alone(2), global_batch_size=4)))
    assert [leaf.values for leaf in batch] == [
        (["a0", "a1"], ["a2", "a3"]),
        (["b0", "b1"], ["b2", "b3"]),
    ]


def test_getitems_is_used() -> None:
    class Many(Counting):
        def __getitems__(self, indices: list[int]) -> list[int]:
            self.asked.append(len(indices))
            return indices

    source = Many(10)
    assert epoch(distribute_dataset(source, alone(2), global_batch_size=4))[2] == [[8], [9]]
    assert source.asked == [4, 4, 2]


@pytest.mark.parametrize("source", [X, Counting(0), [], iter(()), Files(["a"], lambda _: [])])
def test_an_empty_source_gives_no_steps(source: Any) -> None:
    source = source[:0] if source is X else source
    assert list(distribute_dataset(source, alone(2), global_batch_size=4)) == []


# Bad input.


@pytest.mark.parametrize(
    ("source", "options", "error", "message"),
    [
        ((X, Y[:9]), {}, ValueError, r"equal lengths in axis 0, got \[10, 9\]"),
        ((X, "ab"), {}, TypeError, "got str"),
        (torch.tensor(1.0), {}, TypeError, "got a scalar"),
        ({}, {}, ValueError, "empty dict"),
        (3, {}, TypeError, "got int"),
        ("abc", {}, TypeError, "got str"),
        (X, {"global_batch_size": 0}, ValueError, "at least 1, got 0"),
        (X, {"global_batch_size": 2.0}, TypeError, "expected an int, got 2.0"),
        (X, {"global_batch_size": True}, TypeError, "expected an int, got True"),
        (X, {"global_batch_size": None}, TypeError, "global_batch_size"),
        (X, {"seed": -1}, ValueError, "seed: expected at least 0"),
        (X, {"prefetch": -1}, ValueError, "prefetch"),
        (X, {"num_workers": "2"}, TypeError, "num_workers"),
        (X, {"collate_fn": 3}, TypeError, "collate_fn"),
        (X, {"collate_fn": list}, ValueError, "sliced, not collated"),
        (iter([1]), {"shuffle": True}, ValueError, "read by index"),
        (Files(["a"], list), {"shuffle": True}, ValueError, "order of files"),
        (iter([1]), {"num_workers": 1}, ValueError, "get_worker_info"),
        (object(), {}, TypeError, "got object"),
    ],
)
def test_bad_arguments(source: Any, options: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        distribute_dataset(source, alone(), **{"global_batch_size": 2, **options})


@pytest.mark.parametrize(
    ("shapes", "warns"),
    [
        (((4, 3), (4,)), True),
        (((4, 3), (4, 1)), True),
        (((4, 3),), False),
        (((5, 3), (5,)), False),
        (((4, 3), (3,)), False),
        (((4,), ()), False),
        (((4,),), False),
    ],
)
def test_a_list_of_batches(shapes: Any, warns: bool) -> None:
    batches = [tuple(torch.ones(shape) for shape in shapes)] * 2
    expected = pytest.warns(UserWarning, match="have 4 rows in every array.*takes examples")
    with expected if warns else contextlib.nullcontext():
        distribute_dataset(batches, alone(), global_batch_size=4)


def test_examples_that_differ_in_structure() -> None:
    made = distribute_dataset([(1, 2), (3,)], alone(), global_batch_size=2)
    with pytest.raises(ValueError, match="differ in structure; give collate_fn"):
        list(made)


@pytest.mark.parametrize(
    ("one", "other", "message"),
    [
        ({"x": X}, {"y": X}, r"dict with keys \['x'\] and dict with keys \['y'\]"),
        ((X, X), (X, X, X), "tuple of 2 and tuple of 3"),
        ((X, X), (X, {"x": X}), r"\[1\]: Tensor and dict"),
        ({"x": (X,)}, {"x": [X]}, r"\['x'\]: tuple of 1 and list of 1"),
    ],
)
def test_replicas_whose_batches_differ_in_structure(one: Any, other: Any, message: str) -> None:
    made = distribute_datasets_from_function(lambda _: [one, other], alone(2))
    with pytest.raises(ValueError, match=f"different structures at .*{message}"):
        next(iter(made))


def test_a_batch_must_show_its_size() -> None:
    made = distribute_datasets_from_function(lambda _: [3], alone())
    with pytest.raises(TypeError, match="array or a list"):
        next(iter(made))


def test_an_iterator_is_good_for_one_epoch() -> None:
    made = distribute_dataset(iter(range(3)), alone(), global_batch_size=2)
    assert epoch(made) == [[[0, 1]], [[2]]]
    with pytest.raises(ValueError, match="exhausted after one epoch"):
        list(made)


@pytest.mark.parametrize(
    ("paths", "read", "error"),
    [("a.txt", list, TypeError), ([], list, ValueError), (["a"], 3, TypeError)],
)
def test_bad_files(paths: Any, read: Any, error: Any) -> None:
    with pytest.raises(error, match="Files"):
        Files(paths, read)
