"""Small dense variables and rows of tables that share one message per server."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
import pytest
from fastdist.ps import Client, DenseSpec, Item, RowsSpec, RuleSpec, Server
from fastdist.ps.client.partition import FixedShards, RoundRobin
from fastdist.ps.client.sharded import Lookup, commit_round, items_of, pull_together
from fastdist.ps.wire.protocol import (
    IDS,
    PART_SIZE,
    SMALL_SIZE,
    Entry,
    Op,
    pack_names,
)
from sharded_things import ShardedRows, ShardedVariable, pull, pull_rows

SGD = RuleSpec("SGD", {"lr": 1.0})
SHAPES = [(), (3,), (7, 5), (0,), (SMALL_SIZE,), (SMALL_SIZE + 2,), (2, PART_SIZE)]


@pytest.fixture
def servers() -> Iterator[list[Server]]:
    with Server() as one, Server() as two:
        yield [one, two]


@pytest.fixture
def client(servers: list[Server]) -> Iterator[Client]:
    with Client([server.address for server in servers], timeout_s=20) as client:
        yield client


def make(client: Client, wire: str = "float32", **options: bool) -> list[ShardedVariable]:
    """Return variables of all sizes; those with several rows have two pieces."""
    placement = RoundRobin(2, FixedShards(2))
    made = []
    for number, shape in enumerate(SHAPES):
        spec = DenseSpec(f"{number}", shape, SGD, wire=wire, **options)
        pieces = placement.place(shape, 4)
        made.append(ShardedVariable(client, spec, pieces, np.full(shape, float(number))))
    return made


def joined(changes: list[list[Item]]) -> list[Item]:
    return list(chain.from_iterable(changes))


def names(number: int, size: int = 2, count: int = 1, begin: int = 0) -> bytes:
    return pack_names([Entry(number, np.nan, size, begin)] * count, [])


def values_of(client: Client, variables: list[ShardedVariable]) -> list[np.ndarray]:
    lookups = [variable.lookup() for variable in variables]
    return [pulled.value for pulled in pull_together(client, lookups)]


@pytest.mark.parametrize("wire", ["float32", "bfloat16", "float16", "int8"])
def test_pushes_and_pulls(client: Client, wire: str) -> None:
    variables = make(client, wire)
    gradients = [np.full(shape, 0.5 * number, np.float32) for number, shape in enumerate(SHAPES)]
    changes = [v.change(g, 2.0) for v, g in zip(variables, gradients, strict=True)]
    client.wait_all(client.begin_change(joined(changes[:3])))
    client.wait_all(client.begin_change(joined([variables[0].change(gradients[0]), *changes[3:]])))
    outs = [np.full(shape, 9.0, np.float32) if shape else None for shape in SHAPES]
    lookups = [variable.lookup(out) for variable, out in zip(variables, outs, strict=True)]
    pulled = pull_together(client, lookups)
    for number, (got, out) in enumerate(zip(pulled, outs, strict=True)):
        assert out is None or got.value is out
        assert got.value.shape == SHAPES[number]
        np.testing.assert_allclose(got.value, 0, atol=2e-4 if wire == "int8" else 0)


def test_one_message_for_each_server(client: Client, servers: list[Server]) -> None:
    variables = [*make(client)[:5]]
    before = [server.stats()["requests"] for server in servers]
    pulled = pull_together(client, [one.lookup() for one in variables])
    changes = [v.change(one.value) for v, one in zip(variables, pulled, strict=True)]
    client.wait_all(client.begin_change(joined(changes)))
    assert [
        server.stats()["requests"] - was for server, was in zip(servers, before, strict=True)
    ] == [2, 2]


def test_a_change_brings_new_values(client: Client, servers: list[Server]) -> None:
    variables = make(client)
    pieces = RoundRobin(2, FixedShards(2)).place((9, 2), 4)
    table = ShardedRows(client, RowsSpec("t", 2, SGD, rows=9), pieces)
    before = [server.stats()["requests"] for server in servers]
    changes = [variable.change(np.ones(variable.spec.shape)) for variable in variables[:3]]
    lookups = [variable.lookup() for variable in variables[:5]] + [table.lookup([8])]
    changes.append(table.change([8], [[1, 2]]))
    client.wait_all(client.begin_change(joined(changes), then_read=items_of(lookups)))
    assert [one.value.max(initial=-9) for one in lookups] == [-1, 0, 1, -9, 4, -1]
    assert [
        server.stats()["requests"] - was for server, was in zip(servers, before, strict=True)
    ] == [1, 1]
    # Large values have messages of their own, which are answered after the change.
    large = variables[6]
    lookups = [large.lookup(), variables[0].lookup()]
    change = large.change(np.ones(large.spec.shape))
    client.wait_all(client.begin_change(change, then_read=items_of(lookups)))
    assert (lookups[0].value == 5).all()
    assert lookups[1].value == -1


def test_a_repeated_change_brings_values_again(client: Client, servers: list[Server]) -> None:
    (server, number, _), *_ = make(client)[1].parts
    values = np.empty(3, np.float32)
    items = [Item(server, number, np.ones(2, np.float32))]
    (ticket,) = client.begin_change(items, then_read=[Item(server, number, values[:2])])
    client._send(ticket)
    client.wait(ticket)
    assert (pull(client, server, number, (2,)) == 0).all()
    assert (values[:2] == 0).all()
    assert servers[server].stats()["repeated"] == 1


@pytest.mark.parametrize(
    ("ids", "error"), [([0, 9], IndexError), ([2**63], IndexError), (None, ValueError)]
)
def test_nothing_changes_where_the_values_cannot_be_read(
    client: Client, ids: list[int] | None, error: type[Exception]
) -> None:
    table = client.create(0, RowsSpec("t", 2, SGD, rows=9))
    ones = np.ones((1, 2), np.float32)
    wanted = np.empty((len(ids or [0]), 2), np.float32)
    where = None if ids is None else np.array(ids, np.uint64)
    (ticket,) = client.begin_change(
        [Item(0, table, ones, np.array([0]))], then_read=[Item(0, table, wanted, where)]
    )
    with pytest.raises(error):
        client.wait(ticket)
    assert (pull_rows(client, 0, table, [0], 2) == 0).all()


def test_many_values_take_several_messages(client: Client, servers: list[Server]) -> None:
    count = 2 * PART_SIZE // SMALL_SIZE + 1
    pieces = RoundRobin(1).place((SMALL_SIZE,), 4)
    variables = [
        ShardedVariable(
            client, DenseSpec(f"{i}", (SMALL_SIZE,), SGD), pieces, np.full(SMALL_SIZE, i)
        )
        for i in range(count)
    ]
    before = servers[0].stats()["requests"]
    values = pull_together(client, [one.lookup() for one in variables])
    assert [one.value[-1] for one in values] == list(range(count))
    assert servers[0].stats()["requests"] - before == 3


def test_rounds(client: Client) -> None:
    variables = make(client)
    for _ in range(2):
        changes = [variable.change(np.ones(variable.spec.shape)) for variable in variables]
        client.wait_all(client.begin_change(joined(changes), round=4))
    assert [value.min(initial=1e9) for value in values_of(client, variables)][1] == 1
    things = [(variable, 0.5) for variable in variables[1:]]
    assert commit_round(client, 4, things, weight=2.0) is True
    got = values_of(client, variables)
    assert (got[0] == 0).all()
    assert all((value == number - 0.5).all() for number, value in enumerate(got) if number)


def test_an_invalid_entry_changes_nothing(client: Client, servers: list[Server]) -> None:
    variables = make(client, refuse_nonfinite=True)
    bad = np.ones((7, 5), np.float32)
    bad[0, 0] = np.nan
    wrong = variables[1].change(np.ones(3)) + variables[2].change(bad)
    for round in (0, 3):
        with pytest.raises(ValueError, match=r"'2\[0:\]': 1 of 20 elements .* NaN or infinite"):
            client.wait_all(client.begin_change(wrong, round))
    with pytest.raises(ValueError, match="lr must be a finite number, 0 or more, got -1"):
        client.wait_all(
            client.begin_change(
                variables[0].change(np.ones(()), 1.0) + variables[0].change(np.ones(()), -1.0)
            )
        )
    (server, number, _), *_ = variables[1].parts
    about = names(number)
    for op, frames, message in (
        (
            Op.CHANGE,
            [about, bytes(4)],
            r"expected values of shape \(2,\), got 4 bytes instead of 8",
        ),
        (Op.CHANGE, [about[:-1], bytes(8)], "31 bytes for 1 entries of 24 bytes"),
        (Op.CHANGE, [about + bytes(8), bytes(8)], "8 bytes of ids, the entries name 0"),
        (Op.READ, [names(number, 1, begin=IDS) + bytes(8)], "a DenseSpec, expected a RowsSpec"),
        (Op.READ, [names(number + 99)], "does not exist"),
        (Op.READ, [about + bytes(9)], "9 bytes of ids, the entries name 0"),
        (Op.READ, [b"\xff" * 40], "40 bytes for 18446744073709551615 entries"),
    ):
        with pytest.raises(ValueError, match=message):
            client.wait(client.submit(server, op, 0, frames))
    got = values_of(client, variables)
    assert got[0] == 0
    assert (got[1][:2] == 1).all()
    assert (got[2][:4] == 2).all()
    assert commit_round(client, 3, [(variables[2], None)]) is True
    assert (values_of(client, variables)[2][:4] == 2).all()
    entries = [entry for one in servers for entry in one.stats()["objects"]]
    assert {entry["name"]: entry["nonfinite"] for entry in entries}["2[0:]"] == 2


def test_a_push_sent_again_counts_once(client: Client, servers: list[Server]) -> None:
    (variable,) = make(client)[1:2]
    (server, number, _), *_ = variable.parts
    frames = [names(number), np.ones(2, np.float32)]
    ticket = client.submit(server, Op.CHANGE, number, frames)
    for _ in range(3):
        client._connections[server].send(ticket.header.pack(), frames)
    client.wait(ticket)
    assert (variable.pull()[:2] == 0).all()
    assert servers[server].stats()["repeated"] == 3


@pytest.mark.slow
def test_messages_read_few_elements(client: Client) -> None:
    """A few bytes that name a large variable would request gigabytes of memory."""
    sizes = {"large": PART_SIZE + 1, "small": SMALL_SIZE, "empty": 0}
    numbers = {}
    for name, size in sizes.items():
        numbers[name] = client.create(0, DenseSpec(name, (size,), SGD), np.zeros(size, np.float32))

    def ask(op: Op, name: str, count: int) -> None:
        number = numbers[name]
        frames: list[Any] = [names(number, sizes[name], count)]
        if op is Op.CHANGE:
            frames.append(np.ones(sizes[name] * count, np.float32))
        client.wait(client.submit(0, op, number, frames))

    limit = f"elements in a message, the limit is {PART_SIZE}"
    with pytest.raises(ValueError, match=f"{PART_SIZE + 1} {limit}"):
        ask(Op.READ, "large", 1)
    with pytest.raises(ValueError, match=f"{PART_SIZE + SMALL_SIZE} {limit}"):
        ask(Op.READ, "small", PART_SIZE // SMALL_SIZE + 1)
    ask(Op.READ, "small", PART_SIZE // SMALL_SIZE)
    for op in (Op.READ, Op.CHANGE):
        with pytest.raises(ValueError, match=f"{PART_SIZE + 1} objects in a message"):
            ask(op, "empty", PART_SIZE + 1)
        assert (pull(client, 0, numbers["small"], (SMALL_SIZE,)) == 0).all()
    ask(Op.CHANGE, "small", PART_SIZE // SMALL_SIZE)
    assert (pull(client, 0, numbers["small"], (SMALL_SIZE,)) == -32).all()


def pull_tables(
    client: Client, tables: list[ShardedRows], ids: list[np.ndarray]
) -> Sequence[Lookup]:
    lookups = [table.lookup(own) for table, own in zip(tables, ids, strict=True)]
    return pull_together(client, lookups)


def tables_of(client: Client, wire: str = "float32") -> list[ShardedRows]:
    """Return fixed and hashed tables of several widths, with a piece on each server."""
    placement = RoundRobin(2, FixedShards(2))
    made = []
    for dim in (1, 4, 7):
        for rows in (10, None):
            spec = RowsSpec(f"{dim} {rows}", dim, SGD, rows, wire=wire)
            pieces = placement.place((10, dim), 4) if rows else placement.everywhere()
            made.append(ShardedRows(client, spec, pieces))
    return made


@pytest.mark.parametrize("wire", ["float32", "bfloat16", "int8"])
def test_tables_share_messages(client: Client, servers: list[Server], wire: str) -> None:
    tables, alone = tables_of(client, wire), tables_of(client, wire)
    variable = make(client)[1]
    random = np.random.default_rng(0)
    ids = [random.integers(0, 10, 9) for _ in tables]
    ids[1][:] = 3  # all on one server
    before = [server.stats()["requests"] for server in servers]
    pulled = pull_tables(client, tables, ids)
    changes = [variable.change(np.ones(3))]
    for table, own, got in zip(tables, ids, pulled, strict=True):
        assert got.value.shape == (9, table.spec.dim)
        changes.append(table.change(own, np.ones(got.value.shape), 0.5))
    client.wait_all(client.begin_change(joined(changes)))
    took = [server.stats()["requests"] - was for server, was in zip(servers, before, strict=True)]
    assert took == [2, 2]
    again = pull_tables(client, alone, ids)
    for table, own, got in zip(tables, ids, again, strict=True):
        times = np.array([(own == id_).sum() for id_ in own])[:, None]
        np.testing.assert_allclose(got.value, np.broadcast_to(-0.5 * times, got.value.shape), 0.02)
        np.testing.assert_array_equal(got.value, table.pull(own))
    assert (variable.pull()[:2] == 0).all()


def test_ids_beyond_a_table_change_nothing(client: Client) -> None:
    spec = RowsSpec("t", 2, SGD, rows=5)
    first, second = (client.create(0, replace(spec, name=name)) for name in ("first", "second"))
    ones = np.ones((1, 2), np.float32)
    items = [Item(0, first, ones, np.array([4])), Item(0, second, ones, np.array([5]))]
    (ticket,) = client.begin_change(items)
    with pytest.raises(IndexError, match="'second': id 5, the table has 5 rows"):
        client.wait(ticket)
    assert (pull_rows(client, 0, first, [4], 2) == 0).all()


def test_many_rows_take_several_messages(client: Client, servers: list[Server]) -> None:
    count = 3 * PART_SIZE // 64 + 5
    table = ShardedRows(client, RowsSpec("wide", 64, SGD), RoundRobin(1).place((1, 64), 4))
    ids = np.arange(count) << 32
    table.assign(ids, np.repeat(np.arange(count)[:, None], 64, 1))
    before = servers[0].stats()["requests"]
    got = table.pull(ids)
    np.testing.assert_array_equal(got[:, 7], np.arange(count))
    assert servers[0].stats()["requests"] - before == 4


def test_the_padding_of_replies_is_zero(client: Client) -> None:
    """The memory of a reply has been that of others."""
    numbers = []
    for name in "ab":
        spec = DenseSpec(name, (3,), SGD, wire="bfloat16")
        numbers.append(client.create(0, spec, np.full(3, 1.7)))
    entries = [Entry(number, np.nan, 3, 0) for number in numbers]
    table = client.create(0, RowsSpec("t", 64, SGD, initializer=("constant", 1.7, 0.0)))
    for _ in range(5):
        pull_rows(client, 0, table, np.arange(9), 64)
        reply = bytes(client.wait(client.submit(0, Op.READ, 0, [pack_names(entries, [])])))
        assert len(reply) == 2 * 8
        assert reply[6:8] == reply[14:16] == bytes(2)
