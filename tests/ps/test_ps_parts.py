"""Large dense values, which travel in parts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import fastdist._core as _core
import numpy as np
import pytest
from fastdist.errors import UnavailableError
from fastdist.ps import Client, DenseSpec, Item, RowsSpec, RuleSpec, Server
from fastdist.ps.client.partition import RoundRobin
from fastdist.ps.client.sharded import commit_round, pull_together
from fastdist.ps.wire.protocol import IDS, PART_SIZE, Entry, Op, pack_names
from hypothesis import given
from hypothesis import strategies as st
from row_tables import push_all
from sharded_things import ShardedVariable, pull, push

SIZE = 2 * PART_SIZE + 77
ADAM = RuleSpec("Adam", {"lr": 0.1})


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as made:
        yield made


@pytest.fixture
def server(stack: ExitStack) -> Server:
    return stack.enter_context(Server())


def variable(stack: ExitStack, server: Server) -> ShardedVariable:
    client = stack.enter_context(Client([server.address], timeout_s=20))
    spec = DenseSpec("w", (SIZE,), ADAM)
    return ShardedVariable(client, spec, RoundRobin(1).place((SIZE,), 4), np.zeros(SIZE))


@given(st.integers(0, 5 * PART_SIZE))
def test_parts_cover_every_element_once(size: int) -> None:
    parts = Item(0, 0, np.broadcast_to(np.float32(0), (size,))).cut()
    ends = [part.begin + part.values.size for part in parts]
    assert [part.begin for part in parts] == [0, *ends[:-1]]
    assert ends[-1] == size
    assert all(part.values.size <= PART_SIZE for part in parts)
    assert all(part.begin % PART_SIZE == 0 for part in parts)


def test_a_push_in_parts_is_one_step(stack: ExitStack, server: Server) -> None:
    sharded = variable(stack, server)
    alone = _core.DenseVariable(np.zeros(SIZE, np.float32), ADAM.make())
    rng = np.random.default_rng(0)
    expected = np.empty(SIZE, np.float32)
    for step in range(3):
        gradient = rng.standard_normal(SIZE, np.float32)
        push_all(alone, gradient, 0.5)
        sharded._client.wait_all(sharded._client.begin_change(sharded.change(gradient, 0.5)))
        (pull,) = pull_together(sharded._client, [sharded.lookup()])
        alone.pull(0, expected)
        np.testing.assert_array_equal(pull.value, expected)
        assert server.stats()["objects"][0]["steps"] == step + 1


def test_a_round_in_parts(stack: ExitStack, server: Server) -> None:
    """Two clients push the same gradient, one of them without parts."""
    one, two = variable(stack, server), variable(stack, server)
    alone = _core.DenseVariable(np.zeros(SIZE, np.float32), ADAM.make())
    gradients = np.random.default_rng(0).standard_normal((2, SIZE), np.float32)
    one._client.wait_all(one._client.begin_change(one.change(gradients[0]), 5))
    (_, number, _), *_ = two.parts
    client = two._client
    for ticket in client.begin_change([Item(0, number, gradients[1])], round=5):
        client.wait(ticket)
    assert commit_round(one._client, 5, [(one, None)], weight=4.0) is True
    push_all(alone, (gradients[0] + gradients[1]) * np.float32(0.25))
    expected = np.empty(SIZE, np.float32)
    alone.pull(0, expected)
    (pull,) = pull_together(one._client, [one.lookup()])
    np.testing.assert_array_equal(pull.value, expected)
    assert server.stats()["objects"][0]["steps"] == 1


def test_invalid_parts(stack: ExitStack, server: Server) -> None:
    sharded = variable(stack, server)
    client, (_, number, _) = sharded._client, sharded.parts[0]
    rows = client.create(0, RowsSpec("t", 2, ADAM, rows=5))

    def ask(op: Op, number: int, begin: int, size: int, *values: np.ndarray) -> None:
        names = pack_names([Entry(number, np.nan, size, begin)], [])
        client.wait(client.submit(0, op, 0, [names, *values]))

    five = np.zeros(5, np.float32)
    for begin in (SIZE - 4, SIZE, IDS - 1):
        message = f"'w': 5 elements from {begin} on, the variable has {SIZE}"
        for op, values in ((Op.READ, []), (Op.CHANGE, [five])):
            with pytest.raises(ValueError, match=message):
                ask(op, number, begin, 5, *values)
    with pytest.raises(ValueError, match=r"expected values of shape \(4,\), got 20 bytes"):
        ask(Op.CHANGE, number, PART_SIZE, 4, five)
    with pytest.raises(ValueError, match=f"'w': a range from 7 on, not a multiple of {PART_SIZE}"):
        ask(Op.READ, number, 7, 4)
    for op, round_ in ((Op.CHANGE, 0), (Op.ASSIGN, 0), (Op.CHANGE, 3)):
        other = Entry(client.create(0, DenseSpec("v", (5,), ADAM), five), np.nan, 5, 0)
        names = pack_names([other, Entry(number, np.nan, 5, 7)], [])
        with pytest.raises(
            ValueError, match=f"'w': a range from 7 on, not a multiple of {PART_SIZE}"
        ):
            client.wait(client.submit(0, op, 0, [names, np.ones(10, np.float32)], round=round_))
        assert not pull(client, 0, other.object, (5,)).any()
    with pytest.raises(ValueError, match="'t' is a RowsSpec, expected a DenseSpec"):
        ask(Op.READ, rows, 0, 2)
    with pytest.raises(ValueError, match="'w' is a DenseSpec, expected a RowsSpec"):
        ask(Op.READ, number, IDS, 0)
    with pytest.raises((ValueError, UnavailableError)):
        push(client, 0, number, np.zeros(SIZE + 1))
    assert not pull(client, 0, number, (SIZE,)).any()


def test_a_part_of_a_variable() -> None:
    alone = _core.DenseVariable(np.arange(40_000, dtype=np.float32), ADAM.make())
    whole = _core.DenseVariable(np.arange(40_000, dtype=np.float32), ADAM.make())
    gradient = np.random.default_rng(1).standard_normal(40_000, np.float32)
    push_all(whole, gradient)
    for begin, end in ((32_768, 40_000), (0, 16_384), (16_384, 32_768)):
        alone.push(begin, gradient[begin:end])
    assert (alone.step, whole.step) == (1, 1)
    expected, part = np.empty(40_000, np.float32), np.empty(20_000, np.float32)
    whole.pull(0, expected)
    alone.pull(15_000, part)
    np.testing.assert_array_equal(part, expected[15_000:35_000])
    for begin in (20_001, 40_001, 2**64 - 1):
        with pytest.raises(IndexError, match=f"20000 elements from {begin} on"):
            alone.pull(begin, part)
        with pytest.raises(IndexError, match="the variable has 40000"):
            alone.push(begin, part)
