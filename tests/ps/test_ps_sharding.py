"""Sharding of variables and tables over servers."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import fastdist._core as _core
import numpy as np
import pytest
import torch
from fastdist.ps import Client, DenseSpec, RowsSpec, RuleSpec, Server
from fastdist.ps.client.partition import (
    FixedShards,
    MaxSizePartitioner,
    MinSizePartitioner,
    Partitioner,
    Piece,
    RoundRobin,
    piece_bounds,
)
from hypothesis import given
from hypothesis import strategies as st
from sharded_things import ShardedRows, ShardedVariable

SGD = RuleSpec("SGD", {"lr": 1.0})


def test_variables_go_to_servers_in_turn() -> None:
    placement = RoundRobin(3)
    placed = [placement.place(shape, 4) for shape in ((5, 2), (), (7,), (3, 3))]
    assert [[piece.server for piece in pieces] for pieces in placed] == [[0], [1], [2], [0]]
    assert placed[1] == (Piece(1, 0, 1),)


@pytest.mark.parametrize(
    ("rows", "pieces", "sizes"),
    [(10, 4, [3, 3, 2, 2]), (3, 4, [1, 1, 1]), (0, 3, [0]), (6, 3, [2, 2, 2]), (7, 1, [7])],
)
def test_pieces_differ_by_one(rows: int, pieces: int, sizes: list[int]) -> None:
    bounds = piece_bounds(rows, pieces)
    assert [end - begin for begin, end in itertools.pairwise(bounds)] == sizes


@pytest.mark.parametrize(
    ("partitioner", "shape", "itemsize", "cuts"),
    [
        (FixedShards(2), (10, 3), 4, (2, 1)),
        (FixedShards(8), (3, 3), 4, (3, 1)),
        (MinSizePartitioner(100, max_shards=10), (100, 1), 4, (4, 1)),
        (MinSizePartitioner(100, max_shards=2), (100, 1), 4, (2, 1)),
        (MinSizePartitioner(4096, max_shards=8), (100, 1), 4, (1, 1)),
        (MinSizePartitioner(), (1 << 20, 4), 4, (1, 1)),
        (MaxSizePartitioner(100), (100,), 4, (4,)),
        (MaxSizePartitioner(99), (100,), 4, (5,)),
        (MaxSizePartitioner(10), (7, 5), 4, (7, 1)),
        (MaxSizePartitioner(10, max_shards=3), (7, 5), 4, (3, 1)),
        (MaxSizePartitioner(1 << 30), (7, 5), 4, (1, 1)),
    ],
)
def test_partitioners(
    partitioner: Partitioner, shape: tuple[int, ...], itemsize: int, cuts: tuple[int, ...]
) -> None:
    assert partitioner(shape, itemsize) == cuts


def test_invalid_partitioners() -> None:
    for make in (
        lambda: FixedShards(0),
        lambda: MinSizePartitioner(0),
        lambda: MinSizePartitioner(max_shards=-1),
        lambda: MaxSizePartitioner(0),
        lambda: MaxSizePartitioner(1, max_shards=0),
        lambda: RoundRobin(0),
    ):
        with pytest.raises(ValueError, match="must be at least 1, got"):
            make()
    with pytest.raises(ValueError, match=r"first axis only.*got \(1, 2\)"):
        RoundRobin(2, lambda shape, itemsize: (1, 2)).place((4, 4), 4)


@given(
    st.integers(0, 200), st.integers(1, 9), st.integers(1, 5), st.integers(0, 20), st.integers(1, 4)
)
def test_pieces_cover_every_row_once(
    rows: int, shards: int, servers: int, before: int, width: int
) -> None:
    placement = RoundRobin(servers, FixedShards(shards))
    for _ in range(before):
        placement.place((), 4)
    pieces = placement.place((rows, width), 4)
    assert [piece.begin for piece in pieces] == [0, *(piece.end for piece in pieces[:-1])]
    assert pieces[-1].end == rows
    assert [p.server for p in pieces] == [(before + i) % servers for i in range(len(pieces))]


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with ExitStack() as stack:
        addresses = [stack.enter_context(Server()).address for _ in range(3)]
        yield stack.enter_context(Client(addresses, timeout_s=20))


@pytest.mark.parametrize("shape", [(), (1,), (10, 3), (2, 2, 2), (0, 4)])
@pytest.mark.parametrize("shards", [1, 2, 4])
def test_a_sharded_variable(client: Client, shape: tuple[int, ...], shards: int) -> None:
    pieces = RoundRobin(3, FixedShards(shards)).place(shape, 4)
    spec = DenseSpec(f"w{shape}{shards}", shape, SGD)
    initial = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
    variable = ShardedVariable(client, spec, pieces, initial)
    assert variable.pull().shape == shape
    assert (variable.pull() == initial).all()
    variable.push(np.ones(shape))
    assert (ShardedVariable(client, spec, pieces).pull() == initial - 1).all()
    variable.assign(initial)
    assert (variable.pull() == initial).all()
    with pytest.raises(ValueError, match="has shape"):
        variable.push(np.ones((*shape, 2)))


def test_rows_come_in_the_order_asked(client: Client) -> None:
    spec = RowsSpec("five", 2, SGD, rows=5)
    table = ShardedRows(client, spec, RoundRobin(3, FixedShards(3)).place((5, 2), 4))
    assert [(p.begin, p.end) for p in table.pieces] == [(0, 2), (2, 4), (4, 5)]
    table.assign(np.arange(5), [[1, 2], [3, 4], [5, 6], [7, 8], [9, 10]])
    assert table.pull([0, 3, 4]).tolist() == [[1, 2], [7, 8], [9, 10]]
    assert table.pull([4, 0, 4]).tolist() == [[9, 10], [1, 2], [9, 10]]
    for bad in (5, -1, 2**62):
        with pytest.raises(IndexError, match=f"'five': row {bad} of a table that has 5 rows"):
            table.pull([1, bad])
    with pytest.raises(ValueError, match=r"2 ids need values of shape \(2, 2\), got \(1, 2\)"):
        table.push([1, 2], [[1.0, 2.0]])


@pytest.mark.parametrize("limit", [None, 1000])
@pytest.mark.parametrize("shards", [1, 3])
def test_a_table_on_several_servers(client: Client, limit: int | None, shards: int) -> None:
    spec = RowsSpec(f"t{limit}{shards}", 3, SGD, rows=limit)
    pieces = RoundRobin(3, FixedShards(shards)).place((limit or 3, 3), 4)
    table = ShardedRows(client, spec, pieces)
    rng = np.random.default_rng(5)
    kept: dict[int, np.ndarray] = {}
    for _ in range(20):
        high = limit or 2**63 - 1
        ids = rng.integers(0, high, 50) if limit else rng.integers(-high, high, 50) // 2**56
        gradients = rng.standard_normal((50, 3)).astype(np.float32)
        table.push(ids, gradients)
        for i, gradient in zip(ids.tolist(), gradients, strict=True):
            kept[i] = kept.get(i, np.zeros(3, np.float32)) - gradient
        asked = rng.permutation(np.concatenate([ids, ids[:7]]))
        expected = np.stack([kept[i] for i in asked.tolist()])
        np.testing.assert_allclose(table.pull(asked), expected, rtol=0, atol=1e-5)
    if shards > 1:
        rows = [client.stats(server)["objects"] for server in range(3)]
        counts = [
            sum(o["rows"] for o in objects if o["name"].startswith(spec.name)) for objects in rows
        ]
        assert sum(counts) == len(kept)
        assert min(counts) > 0.5 * max(counts)


@given(
    st.lists(st.integers(0, 99) | st.integers(0, 5), max_size=200),
    st.integers(1, 5),
    st.booleans(),
)
def test_routes(given_ids: list[int], owners: int, is_hashed: bool) -> None:
    """Every id goes to its owner with its number there, and its row comes back."""
    ids = np.array(given_ids, np.int64)
    bounds = piece_bounds(100, owners)
    if is_hashed:
        route, begins = _core.Owners(owners), [0] * owners
        expected = route.owners_of(ids)
    else:
        begins = list(bounds[:-1])
        route = _core.Owners(owners, begins, 100)
        expected = np.searchsorted(bounds, ids, "right") - 1
        assert (route.owners_of(ids) == expected).all()
    local, counts, places = route.route(ids)
    assert (len(counts), sum(counts)) == (owners, local.size)
    owner = np.repeat(np.arange(owners), counts)
    whole = local.astype(np.int64) + np.take(begins, owner)
    if places is None:
        assert (whole == ids).all()
    else:
        assert (whole == ids[places]).all()
        assert sorted(places) == list(range(ids.size))
        assert (owner == expected[places]).all()


def test_hashed_ids_keep_their_owners() -> None:
    """With another hash, servers would not find the rows of older checkpoints."""
    ids = np.array([0, 1, 2, 3, 100, 2**40, -1, -5, 2**63 - 1])
    assert _core.Owners(7).owners_of(ids).tolist() == [0, 2, 6, 0, 1, 0, 4, 1, 2]
    many = [0, 338, 858, 118, 153, 2, 706, 281, 353]
    assert _core.Owners(1000).owners_of(ids).tolist() == many


@pytest.mark.filterwarnings(
    "ignore:Sparse invariant checks"
)  # torch's Adagrad creates its own state
@pytest.mark.parametrize("servers", [1, 3])
@pytest.mark.parametrize("rows", [40, None])
@pytest.mark.parametrize(
    ("rule", "torchs"),
    [
        (RuleSpec("Adam", {"lr": 0.01}), torch.optim.SparseAdam),
        (RuleSpec("Adagrad", {"lr": 0.1, "lr_decay": 0.1}), torch.optim.Adagrad),
    ],
    ids=["Adam", "Adagrad"],
)
def test_all_servers_count_all_steps(
    servers: int, rows: int | None, rule: RuleSpec, torchs: Any
) -> None:
    """Also servers without a row of the step, and steps without any row."""
    random = np.random.default_rng(3)
    initial = random.standard_normal((40, 4)).astype(np.float32)
    weight = torch.nn.Parameter(torch.from_numpy(initial.copy()))
    optimizer = torchs([weight], **rule.options)
    with ExitStack() as stack:
        addresses = [stack.enter_context(Server()).address for _ in range(servers)]
        client = stack.enter_context(Client(addresses))
        placement = RoundRobin(servers, FixedShards(servers))
        pieces = placement.place((40, 4), 4) if rows else placement.everywhere()
        table = ShardedRows(client, RowsSpec("rows", 4, rule, rows), pieces)
        table.assign(np.arange(40), initial)
        for step in range(12):
            ids = random.integers(0, 10, 3) if step % 3 else np.zeros(0, np.int64)
            gradient = random.standard_normal((ids.size, 4)).astype(np.float32)
            table.push(ids, gradient)
            weight.grad = torch.sparse_coo_tensor(
                ids[None], gradient, (40, 4), check_invariants=True
            )
            optimizer.step()
        last = np.array([35])
        table.push(last, np.ones((1, 4), np.float32))
        weight.grad = torch.sparse_coo_tensor(
            last[None], np.ones((1, 4), np.float32), (40, 4), check_invariants=True
        )
        optimizer.step()
        np.testing.assert_allclose(table.pull(np.arange(40)), weight.detach(), atol=1e-6)


def test_the_limit_of_rows_is_for_all_servers() -> None:
    with ExitStack() as stack:
        addresses = [stack.enter_context(Server()).address for _ in range(3)]
        client = stack.enter_context(Client(addresses))
        spec = RowsSpec("rows", 2, SGD, max_rows=3000)
        table = ShardedRows(client, spec, RoundRobin(3).everywhere())
        for ids in np.arange(12_000).reshape(12, -1):
            table.push(ids, np.ones((ids.size, 2), np.float32))
        kept = sum(client.stats(server)["objects"][0]["rows"] for server in range(3))
        assert 2400 <= kept <= 3000
