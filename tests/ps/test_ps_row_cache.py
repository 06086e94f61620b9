"""Rows that are served from a worker's cache."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from fastdist.ps import Client, RowsSpec, RuleSpec, Server
from fastdist.ps.client.partition import RoundRobin
from fastdist.ps.model.table import RowCache
from hypothesis import given
from hypothesis import strategies as st
from sharded_things import ShardedRows

SGD = RuleSpec("SGD", {"lr": 1.0})


class CountedRows(ShardedRows):
    pulled = 0  # ids, so far

    def pull(self, ids: Any) -> np.ndarray:
        self.pulled += len(ids)
        return super().pull(ids)


@pytest.fixture(scope="module")
def table() -> Iterator[CountedRows]:
    with Server() as server, Client([server.address]) as client:
        yield CountedRows(client, RowsSpec("r", 3, SGD), RoundRobin(1).place((1, 3), 4))


def test_rows_are_served_until_they_expire(table: CountedRows) -> None:
    table.assign([1, 2, 3], np.zeros((3, 3)))
    cache, before = RowCache(table, max_rows=1000, max_age=2), table.pulled
    assert (cache.pull([1, 2, 2]) == 0).all()
    table.assign([1, 2, 3], np.ones((3, 3)))  # by another client
    assert cache.pull([3, 1])[:, 0].tolist() == [1, 0]
    assert cache.pull([2, 3])[:, 0].tolist() == [0, 1]
    assert table.pulled - before == 4
    assert cache.pull([1, 2, 3])[:, 0].tolist() == [1, 1, 1]
    assert table.pulled - before == 6


def test_forgotten_rows_are_pulled_again(table: CountedRows) -> None:
    cache = RowCache(table, max_rows=1000, max_age=100)
    table.assign([1, 2], np.zeros((2, 3)))
    assert (cache.pull([1, 2]) == 0).all()
    table.push([2, 2], np.ones((2, 3)), lr=0.5)
    cache.forget([2, 2])
    assert cache.pull([1, 2])[:, 0].tolist() == [0, -1]
    table.push([1, 2], np.ones((2, 3)))
    cache.forget([1, 77])
    assert cache.pull([1, 2])[:, 0].tolist() == [-1, -1]


@given(
    st.lists(st.lists(st.integers(-5, 30), max_size=12), max_size=20),
    st.integers(1, 9),
    st.integers(0, 3),
)
def test_shared_slots(
    table: CountedRows, pulls: list[list[int]], max_rows: int, max_age: int
) -> None:
    """Ids that share a slot still get their own rows."""
    everything = np.arange(-5, 31)
    table.assign(everything, np.repeat(everything[:, None], 3, 1))
    cache, before = RowCache(table, max_rows=max_rows, max_age=max_age), table.pulled
    for ids in pulls:
        assert (cache.pull(np.array(ids, np.int64)) == np.array(ids).reshape(-1, 1)).all()
    assert max_age or table.pulled - before == sum(map(len, pulls))
    cache.forget([7])
    cache.pull(np.array([7]))
    before = table.pulled
    cache.pull(np.array([7]))
    assert table.pulled - before == (max_age == 0)
