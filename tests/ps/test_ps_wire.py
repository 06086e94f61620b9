"""Narrow encodings of values in messages, and gradients that are not finite."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import fastdist._core as _core
import ml_dtypes
import numpy as np
import pytest
from fastdist.ps import Client, DenseSpec, RowsSpec, RuleSpec, Server
from fastdist.ps.client.partition import RoundRobin
from fastdist.ps.client.sharded import commit_round
from fastdist.ps.wire.protocol import PART_SIZE
from sharded_things import ShardedRows, ShardedVariable

SGD = RuleSpec("SGD", {"lr": 1.0})
WIRES = ["float32", "bfloat16", "float16", "int8"]


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as made:
        yield made


@pytest.fixture
def server(stack: ExitStack) -> Server:
    return stack.enter_context(Server())


@pytest.fixture
def client(stack: ExitStack, server: Server) -> Client:
    return stack.enter_context(Client([server.address], timeout_s=20))


def travelled(values: np.ndarray, wire: str, dim: int) -> np.ndarray:
    """Return values after encoding and decoding, computed with numpy."""
    if wire == "float32":
        return values
    if wire == "bfloat16":
        return values.astype(ml_dtypes.bfloat16).astype(np.float32)
    if wire == "float16":
        return values.astype(np.float16).astype(np.float32)
    message = _core.WireFormat(wire, dim)
    data = np.empty(message.nbytes(values.size), np.uint8)
    message.encode(values, data)
    out = np.empty_like(values)
    message.decode(data, out)
    rows = [values.reshape(-1)[i : i + dim] for i in range(0, values.size, dim)]
    limits = [np.repeat(abs(row).max() / 127 * 0.501, row.size) for row in rows]
    assert (abs(out - values).reshape(-1) <= np.concatenate(limits)).all()
    return out


SPECIAL = [0.0, -0.0, 1.0, -1.0, 65504.0, 65519.9, 65520.0, 1e-7, 6e-8, 2.9e-8, 3e38, 1e-40]
SPECIAL += [np.inf, -np.inf, np.nan, 6.1e-5, 6.09e-5, 1 + 2**-11, 1 + 3 * 2**-11, 0.1, 1 / 3]


@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered in cast")
@pytest.mark.parametrize(("wire", "kind"), [("float16", np.float16), ("bfloat16", None)])
def test_16_bit_values_equal_numpy(wire: str, kind: type | None) -> None:
    rng = np.random.default_rng(0)
    chance = rng.integers(0, 2**32, 100_000, np.uint32).view(np.float32)
    near = (rng.standard_normal(10_000) * 10.0 ** rng.integers(-9, 6, 10_000)).astype(np.float32)
    values = np.concatenate([np.array(SPECIAL, np.float32), near, chance])
    expected = values.astype(kind or ml_dtypes.bfloat16)
    encoded = np.empty(2 * values.size, np.uint8)
    message = _core.WireFormat(wire, 64)
    message.encode(values, encoded)
    is_nan = np.isnan(values)
    got = encoded.view(np.uint16)
    assert (got[~is_nan] == expected.view(np.uint16)[~is_nan]).all()
    everything = np.arange(65536, dtype=np.uint16)
    out = np.empty(65536, np.float32)
    message.decode(everything.view(np.uint8), out)
    np.testing.assert_array_equal(
        out, everything.view(kind or ml_dtypes.bfloat16).astype(np.float32)
    )
    assert np.isnan(encoded.view(kind or ml_dtypes.bfloat16)[is_nan].astype(np.float32)).all()


def test_invalid_messages() -> None:
    with pytest.raises(ValueError, match="expected float32, bfloat16, float16 or int8, got int4"):
        _core.WireFormat("int4", 3)
    with pytest.raises(ValueError, match="dim must be 1 or more"):
        _core.WireFormat("int8", 0)
    message = _core.WireFormat("int8", 5)
    assert [message.nbytes(n) for n in (0, 1, 5, 6, 10)] == [0, 8, 12, 20, 24]
    with pytest.raises(ValueError, match="of 10 values has 24 bytes, got 23"):
        message.decode(np.zeros(23, np.uint8), np.zeros(10, np.float32))


@pytest.mark.parametrize("wire", WIRES)
def test_dense_values(client: Client, wire: str) -> None:
    size = PART_SIZE + 1500
    rng = np.random.default_rng(0)
    initial, gradient = rng.standard_normal((2, size), np.float32)
    spec = DenseSpec("w", (size,), SGD, wire=wire)
    variable = ShardedVariable(client, spec, RoundRobin(1).place((size,), 4), initial)
    np.testing.assert_array_equal(variable.pull(), travelled(initial, wire, 1024))
    variable.push(gradient)
    expected = initial - travelled(gradient, wire, 1024)
    np.testing.assert_array_equal(variable.pull(), travelled(expected, wire, 1024))
    variable.assign(initial)
    np.testing.assert_array_equal(variable.pull(), travelled(initial, wire, 1024))


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("shards", [1, 2])
def test_rows(client: Client, wire: str, shards: int) -> None:
    rng = np.random.default_rng(0)
    initial, gradient = rng.standard_normal((2, 40, 7), np.float32)
    ids = rng.permutation(10**6)[:40]
    spec = RowsSpec("rows", 7, SGD, wire=wire)
    pieces = RoundRobin(1).place((1, 7), 4) * shards
    table = ShardedRows(client, spec, pieces)
    table.assign(ids, initial)
    np.testing.assert_array_equal(table.pull(ids), travelled(initial, wire, 7))
    client.wait_all(client.begin_change(table.change(ids, gradient), 1))
    assert commit_round(client, 1, [(table, None)]) is True
    expected = initial - travelled(gradient, wire, 7)
    np.testing.assert_array_equal(table.pull(ids), travelled(expected, wire, 7))


@pytest.mark.parametrize("refuse", [False, True])
def test_gradients_that_are_not_finite(client: Client, server: Server, refuse: bool) -> None:
    size = PART_SIZE + 5
    pieces = RoundRobin(1).place((size,), 4)
    dense = DenseSpec("w", (size,), SGD, refuse_nonfinite=refuse)
    variable = ShardedVariable(client, dense, pieces, np.zeros(size))
    table = ShardedRows(client, RowsSpec("r", 2, SGD, refuse_nonfinite=refuse), pieces)
    gradient = np.ones(size, np.float32)
    gradient[[1, -1]] = np.nan, np.inf
    rows = np.array([[1, -np.inf], [1, 1]], np.float32)
    for push in (lambda: variable.push(gradient), lambda: table.push([3, 4], rows)):
        if refuse:
            with pytest.raises(ValueError, match=r"[12] of \d+ elements of the gradient are NaN"):
                push()
        else:
            push()
    assert (variable.pull()[0], table.pull([4])[0, 0]) == ((0, 0) if refuse else (-1, -1))
    assert [entry["nonfinite"] for entry in server.stats()["objects"]] == [2, 1]
    if refuse:  # the rest of the round continues
        client.wait_all(client.begin_change(table.change([4], [[1, 1]]), 1))
        with pytest.raises(ValueError, match="nothing was changed"):
            client.wait_all(client.begin_change(table.change([3], rows[:1]), 1))
        assert commit_round(client, 1, [(table, None)]) is True
        assert table.pull([3, 4]).tolist() == [[0, 0], [-1, -1]]
