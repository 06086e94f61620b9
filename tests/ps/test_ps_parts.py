"""Large dense values, which travel in parts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import fastdist._core as _core
import numpy as np
import pytest
from fastdist.errors import UnavailableError
from fastdist.ps import Client, DenseSpec, RuleSpec, Server
from fastdist.ps.client.commit import commit_round
from fastdist.ps.client.partition import RoundRobin
from fastdist.ps.client.sharded import ShardedVariable, begin_pulls
from fastdist.ps.wire.batches import PART_SIZE, PartialPushes, part_numbers, part_slice
from fastdist.ps.wire.frames import decode_floats_into
from fastdist.ps.wire.protocol import Op
from hypothesis import given
from hypothesis import strategies as st

SIZE = 2 * PART_SIZE + 77
ADAM = RuleSpec("Adam", {"lr": 0.1})


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as made:
        yield made


@pytest.fixture
def server(stack: ExitStack) -> Server:
    return stack.enter_context(Server())


def variable(stack: ExitStack, server: Server, storage: str = "float32") -> ShardedVariable:
    client = stack.enter_context(Client([server.address], timeout_s=20))
    spec = DenseSpec("w", (SIZE,), ADAM, storage)
    return ShardedVariable(client, spec, RoundRobin(1).place((SIZE,), 4), np.zeros(SIZE))


@given(st.integers(0, 5 * PART_SIZE))
def test_parts_cover_every_element_once(size: int) -> None:
    extents = [part_slice(part, size) for part in part_numbers(size)]
    assert [e.start for e in extents] == [0, *(e.stop for e in extents[:-1])]
    assert extents[-1].stop == size
    assert all(e.stop - e.start <= PART_SIZE for e in extents)
    with pytest.raises(ValueError, match="of a variable of"):
        part_slice(-(-size // PART_SIZE) + 1, size)


@pytest.mark.parametrize("storage", ["float32", "bfloat16"])
def test_a_push_in_parts_is_one_step(stack: ExitStack, server: Server, storage: str) -> None:
    sharded = variable(stack, server, storage)
    alone = _core.DenseVariable(np.zeros(SIZE, np.float32), ADAM.make(), storage)
    rng = np.random.default_rng(0)
    expected = np.empty(SIZE, np.float32)
    for step in range(3):
        gradient = rng.standard_normal(SIZE, np.float32)
        alone.push(gradient, 0.5)
        sharded.begin_push(gradient, 0.5, step=0).result()
        (pull,) = begin_pulls(sharded._client, [sharded.lookup()]).result()
        alone.pull(expected)
        np.testing.assert_array_equal(pull.value, expected)
        assert pull.steps == (step + 1,)
    assert server.stats()["staleness"] == {"0": 1, "1": 1, "2-3": 1}


def test_a_round_in_parts(stack: ExitStack, server: Server) -> None:
    """Two clients push the same gradient, one of them without parts."""
    one, two = variable(stack, server), variable(stack, server)
    alone = _core.DenseVariable(np.zeros(SIZE, np.float32), ADAM.make())
    gradients = np.random.default_rng(0).standard_normal((2, SIZE), np.float32)
    one.begin_push(gradients[0], round=5).result()
    (_, number, _), *_ = two.parts()
    client = two._client
    client.wait(client.submit(0, Op.PUSH, number, [gradients[1]], round=5))
    assert commit_round(one._client, 5, [(one, None)], weight=4.0).result() is True
    alone.push((gradients[0] + gradients[1]) * np.float32(0.25))
    expected = np.empty(SIZE, np.float32)
    alone.pull(expected)
    (pull,) = begin_pulls(one._client, [one.lookup()]).result()
    np.testing.assert_array_equal(pull.value, expected)
    assert pull.steps == (1,)


def test_invalid_parts(stack: ExitStack, server: Server) -> None:
    sharded = variable(stack, server)
    client, (_, number, _) = sharded._client, sharded.parts()[0]
    with pytest.raises(ValueError, match=f"part 4 of a variable of {SIZE} elements"):
        client.wait(client.submit(0, Op.PULL, number, part=4))
    with pytest.raises(ValueError, match="expected float32 of shape"):
        client.wait(client.submit(0, Op.PUSH, number, [np.zeros(5, np.float32)], part=2))
    out = np.zeros(5, np.float32)
    with pytest.raises(ValueError, match=r"expected float32 of shape \(5,\), got 308 bytes"):
        client.wait(
            client.submit(
                0, Op.PULL, number, part=3, on_reply=lambda reply, _: decode_floats_into(out, reply)
            )
        )
    with pytest.raises((ValueError, UnavailableError)):
        client.push(0, number, np.zeros(SIZE + 1))


def test_incomplete_pushes_are_forgotten() -> None:
    pushes = PartialPushes()
    steps = iter(range(1, 100_000))
    for client in range(5000):
        assert pushes.step_of((bytes([client % 256]), client), 2, lambda: next(steps))[1]
    assert len(pushes._pushes) == 4096
    assert pushes.step_of((bytes([4999 % 256]), 4999), 2, lambda: next(steps)) == (5000, False)
    assert len(pushes._pushes) == 4095


def test_a_part_of_a_variable() -> None:
    alone = _core.DenseVariable(np.arange(40_000, dtype=np.float32), ADAM.make())
    whole = _core.DenseVariable(np.arange(40_000, dtype=np.float32), ADAM.make())
    gradient = np.random.default_rng(1).standard_normal(40_000, np.float32)
    whole.push(gradient)
    step = alone.begin_step()
    for begin, end in ((30_000, 40_000), (0, 7), (7, 30_000)):
        alone.push_part(gradient[begin:end], begin, step)
    assert (alone.step, whole.step) == (1, 1)
    expected, part = np.empty(40_000, np.float32), np.empty(20_000, np.float32)
    whole.pull(expected)
    alone.pull_part(part, 15_000)
    np.testing.assert_array_equal(part, expected[15_000:35_000])
    for begin in (20_001, 40_001, 2**64 - 1):
        with pytest.raises(IndexError, match=f"20000 elements from {begin} on"):
            alone.pull_part(part, begin)
        with pytest.raises(IndexError, match="the variable has 40000"):
            alone.push_part(part, begin, step)
    with pytest.raises(ValueError, match="must hold 40000 elements, got 20000"):
        alone.push(part)
