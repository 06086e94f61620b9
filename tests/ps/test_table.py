"""Tables: initial values, rows against a dict, limits, storage, checkpoints, threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import fastdist._core as _core
import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from row_tables import (
    SGD,
    Floats,
    Given,
    filled,
    floats,
    parts_of,
    present,
    pulled,
    push_all,
    slots_of,
)

# --- initial values -------------------------------------------------------------------------------


@pytest.mark.parametrize("initializer", [("uniform", -0.5, 2.0), ("normal", 1.0, 0.5)])
def test_initial_values_have_their_distribution(initializer: tuple[str, float, float]) -> None:
    table = _core.RowTable(64, SGD, initializer=initializer, seed=7)
    values = pulled(table, np.arange(4000)).astype(np.float64)
    if initializer[0] == "uniform":
        low, high = initializer[1:]
        assert low <= values.min() < low + 1e-3
        assert high - 1e-3 < values.max() <= high
        mean, deviation = (low + high) / 2, (high - low) / 12**0.5
        quantiles = low + (high - low) * np.linspace(0.01, 0.99, 99)
    else:
        mean, deviation = initializer[1:]
        at = torch.linspace(0.01, 0.99, 99, dtype=torch.float64)
        quantiles = (mean + deviation * torch.special.ndtri(at)).numpy()
    noise = deviation / values.size**0.5
    assert abs(values.mean() - mean) < 5 * noise
    assert abs(values.std() - deviation) < 5 * noise
    got = np.quantile(values, np.linspace(0.01, 0.99, 99))
    np.testing.assert_allclose(got, quantiles, atol=20 * noise)
    # Neither elements of a row nor neighbours in a column go together.
    limit = 5 / values.shape[0] ** 0.5
    assert abs(np.corrcoef(values[:, 0], values[:, 1])[0, 1]) < limit
    assert abs(np.corrcoef(values[:-1, 0], values[1:, 0])[0, 1]) < limit


@pytest.mark.parametrize("storage", ["float32", "bfloat16", "int8"])
def test_initial_values_depend_on_seed_and_id_only(storage: str) -> None:
    def make(seed: int, **options: Any) -> _core.RowTable:
        normal = ("normal", 0.0, 1.0)
        return _core.RowTable(5, SGD, initializer=normal, seed=seed, storage=storage, **options)

    ids = np.random.default_rng(6).permutation(1000)
    first, second, fixed = make(1), make(1), make(1, rows=1000)
    before = pulled(first, ids)
    assert len(first) == 0
    first.push(ids, np.zeros((1000, 5), np.float32))
    for i in reversed(range(1000)):
        second.push(ids[i : i + 1], np.zeros((1, 5), np.float32))
    assert len(first) == len(second) == 1000
    for table in (first, second, fixed):
        np.testing.assert_array_equal(pulled(table, ids), before)
    assert (pulled(make(2), ids) != before).any(axis=1).all()
    assert np.unique(before, axis=0).shape == before.shape


def test_a_fixed_table_creates_rows_when_they_are_changed() -> None:
    rows = 1 << 24
    last = rows - 1
    ids = np.array([0, 5, 1 << 20, last])
    normal = ("normal", 0.0, 1.0)
    table = _core.RowTable(1, SGD, rows=rows, initializer=normal, seed=3)
    before = pulled(table, ids)
    np.testing.assert_array_equal(
        before, pulled(_core.RowTable(1, SGD, initializer=normal, seed=3), ids)
    )
    assert len(table) == 0
    table.push(ids[[1, 3]], np.ones((2, 1), np.float32))
    after = before - np.array([[0], [0.5], [0], [0.5]], np.float32)
    np.testing.assert_array_equal(pulled(table, ids), after)
    assert len(table) == 2
    assert present(table) == {5, last}
    assert table.nbytes < rows // 4  # a bit for each row, not a row
    table.clear()
    assert len(table) == 0
    np.testing.assert_array_equal(pulled(table, ids), before)


# --- a table against a dict -----------------------------------------------------------------------

IDS = st.lists(
    st.one_of(st.integers(0, 12), st.sampled_from([2**63, 2**64 - 1, 2**40])), max_size=6
)


class TableModel(RuleBasedStateMachine):
    """Adagrad with lr 1 on rows of two elements, with or without limits."""

    @initialize(
        max_age=st.one_of(st.none(), st.integers(1, 4)),
        max_rows=st.one_of(st.none(), st.integers(1, 5)),
    )
    def make(self, max_age: int | None, max_rows: int | None) -> None:
        self.max_age, self.max_rows = max_age, max_rows
        rule = _core.UpdateRule("Adagrad", lr=1.0, eps=0.0)
        self.table = _core.RowTable(
            2, rule, initializer=("constant", 1.0, 0.0), max_age=max_age, max_rows=max_rows
        )
        self.rows: dict[int, tuple[Floats, Floats]] = {}
        self.touched: dict[int, int] = {}
        self.step = 0
        self.is_exact = True  # False once the table had to choose among equally old rows

    def expire(self) -> None:
        for key, step in list(self.touched.items()):
            if self.max_age is not None and self.step - step > self.max_age:
                del self.rows[key], self.touched[key]

    def limit(self) -> None:
        if self.max_rows is None or len(self.rows) <= self.max_rows:
            return
        steps = sorted(self.touched.values())
        excess = len(steps) - self.max_rows
        self.is_exact = steps[excess - 1] != steps[excess]
        for key, step in list(self.touched.items()):
            if step <= steps[excess - 1]:
                del self.rows[key], self.touched[key]

    def array(self, ids: list[int]) -> npt.NDArray[np.uint64]:
        return np.array(ids, np.uint64)

    def row(self, key: int) -> tuple[Floats, Floats]:
        return self.rows.get(key, (np.ones(2, np.float32), np.zeros(2, np.float32)))

    def touch(self, ids: list[int]) -> None:
        self.touched |= dict.fromkeys(ids, self.step)

    @rule(ids=IDS)
    def pull(self, ids: list[int]) -> None:
        if not self.is_exact:
            return
        out = pulled(self.table, self.array(ids))
        self.touch([key for key in ids if key in self.rows])
        for key, row in zip(ids, out, strict=True):
            np.testing.assert_allclose(row, self.row(key)[0], rtol=1e-6)

    @rule(ids=IDS, size=st.integers(1, 9))
    def push(self, ids: list[int], size: int) -> None:
        if not self.is_exact:
            return
        gradients = np.arange(size, size + 2 * len(ids), dtype=np.float32).reshape(-1, 2)
        self.table.push(self.array(ids), gradients)
        self.step += 1
        self.expire()
        summed: dict[int, Floats] = {}
        for key, gradient in zip(ids, gradients, strict=True):
            summed[key] = summed.get(key, np.zeros(2, np.float32)) + gradient
        for key, gradient in summed.items():
            value, total = self.row(key)
            total = total + gradient**2
            self.rows[key] = (value - gradient / np.sqrt(total), total)
        self.touch(ids)
        self.limit()

    @rule(ids=IDS, with_slots=st.booleans())
    def assign(self, ids: list[int], with_slots: bool) -> None:
        if not self.is_exact:
            return
        values = np.arange(2 * len(ids), dtype=np.float32).reshape(-1, 2)
        slots = values + 3 if with_slots else None
        self.table.assign(self.array(ids), values, slots)
        for key, value in zip(ids, values, strict=True):
            self.rows[key] = (value, value + 3 if with_slots else self.row(key)[1])
        self.touch(ids)
        self.limit()

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "table") or not self.is_exact:
            return
        assert self.table.step == self.step
        found: dict[int, tuple[Floats, Floats]] = {}
        for ids, values, slots in parts_of(self.table):
            assert ids.dtype == np.uint64
            pieces = zip(ids, values, slots, strict=True)
            found |= {int(key): (value, slot) for key, value, slot in pieces}
        assert sorted(found) == sorted(self.rows)
        for key, (value, slot) in found.items():
            np.testing.assert_allclose(value, self.rows[key][0], rtol=1e-6)
            np.testing.assert_allclose(slot, self.rows[key][1], rtol=1e-6)


TestTableModel = TableModel.TestCase
TestTableModel.settings = settings(max_examples=100, stateful_step_count=25, deadline=None)


@pytest.mark.slow
def test_many_rows_come_and_go() -> None:
    rng = np.random.default_rng(8)
    max_age = 5
    table = _core.RowTable(3, SGD, max_age=max_age)
    expected: dict[int, float] = {}
    assigned: dict[int, int] = {}
    for step in range(60):
        ids = rng.integers(0, 40_000, 3000)
        values = floats(rng, ids.size, 3)
        table.assign(ids, values)
        expected |= dict(zip(ids.tolist(), values[:, 1].tolist(), strict=True))
        assigned |= dict.fromkeys(ids.tolist(), step)
        table.push(ids[:0], values[:0])
        for key in [key for key in expected if step + 1 - assigned[key] > max_age]:
            del expected[key]
        assert present(table) == set(expected)
        # Expired rows leave memory within as many pushes again.
        recent = sum(step + 1 - last <= 2 * max_age for last in assigned.values())
        assert len(expected) <= len(table) <= recent
    keys = np.array(list(expected))
    np.testing.assert_array_equal(pulled(table, keys)[:, 1], np.float32(list(expected.values())))
    assert not pulled(table, np.setdiff1d(np.arange(40_000), keys)).any()


def test_a_limit_of_rows_holds_and_keeps_those_in_use() -> None:
    limit = 8192
    table = _core.RowTable(2, SGD, max_rows=limit)
    hot = np.arange(2000)
    zeros = np.zeros((4000, 2), np.float32)
    for begin in range(10_000, 200_000, 2000):
        table.push(np.concatenate([hot, np.arange(begin, begin + 2000)]), zeros)
        assert len(table) <= limit
    assert set(hot.tolist()) <= present(table)
    assert len(table) > 0.85 * limit
    assert table.nbytes < 2 * limit * (8 + 2 * 16) + 64_000


def test_rows_over_the_age_limit_leave_memory_without_being_asked() -> None:
    table = _core.RowTable(2, SGD, max_age=10)
    table.push(np.arange(5000), np.zeros((5000, 2), np.float32))
    for _ in range(10):
        table.push(np.array([0]), np.ones((1, 2), np.float32))
    assert present(table) == set(range(5000))
    for _ in range(10):
        table.push(np.array([0]), np.ones((1, 2), np.float32))
    assert present(table) == {0}
    assert len(table) == 1
    assert pulled(table, [0]).tolist() == [[-10, -10]]


# --- storage --------------------------------------------------------------------------------------


def test_bfloat16_is_rounded_to_nearest_even() -> None:
    rng = np.random.default_rng(9)
    values = np.concatenate([floats(rng, 200, 5), np.float32(1e38) * floats(rng, 10, 5)])
    values[0] = [0.0, -0.0, np.inf, np.nan, 1e-40]
    values[1, 0] = np.finfo(np.float32).max  # rounds to infinity
    with np.errstate(over="ignore"):
        expected = values.astype(ml_dtypes.bfloat16).astype(np.float32)
    table = filled(values, storage="bfloat16")
    np.testing.assert_array_equal(pulled(table, np.arange(210)), expected)


@pytest.mark.parametrize("dim", [1, 3, 64, 129])
def test_int8_is_within_half_a_quantum_and_what_is_pulled_can_be_assigned(dim: int) -> None:
    rng = np.random.default_rng(10)
    values = floats(rng, 500, dim) * np.exp2(rng.integers(-60, 60, (500, 1))).astype(np.float32)
    values[7] = 0
    table = filled(values, storage="int8")
    once = pulled(table, np.arange(500))
    quantum = np.abs(values).max(axis=1, keepdims=True) / 127
    assert (np.abs(once - values) <= 0.501 * quantum).all()
    table.assign(np.arange(500), once)
    np.testing.assert_array_equal(pulled(table, np.arange(500)), once)


def test_a_number_that_is_not_finite_spoils_an_int8_row() -> None:
    values = np.ones((3, 4), np.float32)
    values[1, 2], values[2, 0] = np.inf, np.nan
    out = pulled(filled(values, storage="int8"), np.arange(3))
    assert np.isfinite(out[0]).all()
    assert np.isnan(out[1:]).all()


@pytest.mark.parametrize("storage", ["bfloat16", "int8"])
@pytest.mark.parametrize("name", ["SGD", "Adagrad", "Adam", "AdamW", "RMSprop", "RowWiseAdagrad"])
def test_narrow_steps_are_float32_steps_rounded_once(name: str, storage: str) -> None:
    rng = np.random.default_rng(11)
    rule = _core.UpdateRule(name, lr=0.1)
    narrow = _core.RowTable(7, rule, rows=40, storage=storage)
    wide = _core.RowTable(7, rule, rows=40)
    rounding = _core.RowTable(7, rule, rows=40, storage=storage)
    everything = np.arange(40)
    narrow.assign(everything, pulled(narrow, everything))
    for _ in range(5):
        wide.assign(everything, pulled(narrow, everything), slots_of(narrow, everything))
        gradients = floats(rng, 40, 7)
        narrow.push(everything, gradients)
        wide.push(everything, gradients)
        rounding.assign(everything, pulled(wide, everything))
        np.testing.assert_array_equal(pulled(narrow, everything), pulled(rounding, everything))
        np.testing.assert_array_equal(slots_of(narrow, everything), slots_of(wide, everything))


@pytest.mark.parametrize(
    ("storage", "row_bytes"), [("float32", 256), ("bfloat16", 128), ("int8", 68)]
)
@pytest.mark.parametrize(("rule", "slot_bytes"), [("Adagrad", 256), ("RowWiseAdagrad", 4)])
def test_memory_is_little_more_than_rows_and_slots(
    rule: str, slot_bytes: int, storage: str, row_bytes: int
) -> None:
    rows = 200_000
    table = _core.RowTable(64, _core.UpdateRule(rule), storage=storage)
    for begin in range(0, rows, 4000):
        table.push(np.arange(begin, begin + 4000), np.zeros((4000, 64), np.float32))
    assert len(table) == rows
    index_bytes = 50  # at most, for each row
    assert table.nbytes <= rows * (row_bytes + slot_bytes + index_bytes)


# --- checkpoints, threads -------------------------------------------------------------------------


@pytest.mark.parametrize("storage", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("SGD", {"momentum": 0.9, "dampening": 0.5}),
        ("Adam", {}),
        ("RowWiseAdagrad", {"lr_decay": 0.1}),
    ],
)
def test_a_restored_table_goes_on_as_the_first(name: str, given: Given, storage: str) -> None:
    rng = np.random.default_rng(12)
    rule = _core.UpdateRule(name, **given)

    def make() -> _core.RowTable:
        return _core.RowTable(6, rule, initializer=("normal", 0.0, 1.0), storage=storage)

    def train(table: _core.RowTable, rng: np.random.Generator) -> Floats:
        for _ in range(5):
            ids = rng.integers(0, 2000, 500)
            table.push(ids, floats(rng, ids.size, 6))
        return pulled(table, np.arange(2000))

    first, second = make(), make()
    train(first, rng)
    second.step = first.step
    for ids, values, slots in parts_of(first):
        second.assign(ids, values, slots)
    assert len(second) == len(first)
    after = [train(table, np.random.default_rng(13)) for table in (first, second)]
    np.testing.assert_array_equal(*after)


def test_the_parts_of_a_fixed_table_have_every_row_once() -> None:
    values = floats(np.random.default_rng(14), 1000, 3)
    pieces = parts_of(filled(values))
    assert {ids.size for ids, _, _ in pieces} == {7, 8}
    ids = np.concatenate([ids for ids, _, _ in pieces])
    assert sorted(ids.tolist()) == list(range(1000))
    np.testing.assert_array_equal(np.concatenate([v for _, v, _ in pieces]), values[ids])


@pytest.mark.slow
@pytest.mark.parametrize("hashed", [False, True])
def test_rows_are_whole_while_others_push_and_snapshot(hashed: bool) -> None:
    rows, dim = 2000, 33
    # The pushes touch each of the first rows often enough; rows that `grow` adds expire again.
    limits: Given = {"max_age": 300} if hashed else {"rows": rows}
    table = _core.RowTable(dim, _core.UpdateRule("SGD", lr=1.0, momentum=0.5), **limits)
    everything = np.arange(rows)
    table.push(everything, np.zeros((rows, dim), np.float32))
    stop = threading.Event()
    problems: list[str] = []

    def repeat(work: Callable[[np.random.Generator], None], seed: int) -> Callable[[], None]:
        def run() -> None:
            rng = np.random.default_rng(seed)
            while not stop.is_set():
                work(rng)

        return run

    def push(rng: np.random.Generator) -> None:
        ids = rng.integers(0, rows, 500)
        table.push(ids, np.repeat(rng.integers(-3, 4, (500, 1)), dim, 1).astype(np.float32))

    def pull(rng: np.random.Generator) -> None:
        out = pulled(table, rng.integers(0, rows, 500))
        if (out != out[:, :1]).any():
            problems.append("a torn row was pulled")

    def grow(rng: np.random.Generator) -> None:
        if hashed:
            ids = rows + rng.integers(0, 50_000, 500)
            table.assign(ids, np.ones((500, dim), np.float32))

    works = [push, push, pull, pull, grow]
    threads = [threading.Thread(target=repeat(w, i)) for i, w in enumerate(works)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(5):
            seen: list[int] = []
            for ids, values, slots in parts_of(table):
                assert (values == values[:, :1]).all()
                assert (slots == slots[:, :1]).all()
                seen += ids.tolist()
            assert len(set(seen)) == len(seen)
            assert set(range(rows)) <= set(seen)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert problems == []


def test_concurrent_pushes_are_all_applied() -> None:
    table = _core.RowTable(4, _core.UpdateRule("SGD", lr=1.0))
    variable = _core.DenseVariable(np.zeros(40_000, np.float32), _core.UpdateRule("SGD", lr=1.0))

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(100):
            table.push(rng.integers(0, 300, 64), np.ones((64, 4), np.float32))
            push_all(variable, np.ones(40_000, np.float32))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert table.step == variable.step == 400
    assert pulled(table, np.arange(300)).sum() == -4 * 100 * 64 * 4
    out = np.empty(40_000, np.float32)
    variable.pull(0, out)
    assert (out == -400).all()
