"""Bad requests to tables are refused and change nothing."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import fastdist._core as _core
import numpy as np
import pytest
from row_tables import SGD, Given, filled, floats, pulled

ROWS = np.zeros((2, 3), np.float32)
IDS_OF_ROWS = np.zeros(2, np.int64)


def rules_refused() -> Iterator[tuple[str, Given, str]]:
    yield "Lion", {}, "expected one of SGD, Adagrad, Adam, AdamW, RMSprop, RowWiseAdagrad, got Lion"
    yield "SGD", {"betas": (0.9, 0.99)}, "of SGD: expected one of lr, .*, got beta1"
    yield "Adam", {"momentum": 1}, "got momentum"
    for value in (-1.0, float("nan"), float("inf")):
        yield "SGD", {"lr": value}, "SGD's lr must be a finite number, 0 or more, got"
    yield "Adam", {"betas": (0.9, 1.0)}, "beta2 must be a number from 0 to below 1, got 1"
    yield "RMSprop", {"eps": float("nan")}, "eps must be a finite number"
    yield "SGD", {"nesterov": True}, "nesterov needs a momentum above 0"
    yield "SGD", {"nesterov": True, "momentum": 1, "dampening": 1}, "no dampening, got"


@pytest.mark.parametrize(("name", "given", "message"), list(rules_refused()), ids=str)
def test_wrong_rules(name: str, given: Given, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _core.UpdateRule(name, **given)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dim": 0}, "dim must be from 1 to"),
        ({"storage": "float16"}, "expected float32, bfloat16 or int8, got float16"),
        ({"initializer": ("zeros", 0.0, 0.0)}, "constant, uniform or normal, got zeros"),
        ({"initializer": ("uniform", 1.0, 0.0)}, "from the lower to the higher"),
        ({"initializer": ("normal", 0.0, -1.0)}, "deviation must not be negative"),
        ({"initializer": ("constant", float("nan"), 0.0)}, "must be finite"),
        ({"rows": 5, "max_rows": 5}, "fixed rows evicts none"),
        ({"rows": 2**32}, "at most 2\\^31 rows, got 4294967296"),
        ({"max_rows": 0}, "max_rows must be 1 or more"),
        ({"max_age": 0}, "max_age must be from 1"),
    ],
    ids=str,
)
def test_wrong_tables(options: Given, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _core.RowTable(options.pop("dim", 3), SGD, **options)


@pytest.mark.parametrize(
    ("method", "arguments", "error", "message"),
    [
        ("push", (IDS_OF_ROWS, ROWS[:1]), ValueError, "gradients must hold 2 × 3 elements, got 3"),
        (
            "push",
            (IDS_OF_ROWS, ROWS.astype(np.float64)),
            TypeError,
            "an array of float32, got float64",
        ),
        (
            "push",
            (IDS_OF_ROWS.astype(np.int32), ROWS),
            TypeError,
            "ids must be .* int64 or uint64, got int32",
        ),
        (
            "push",
            (IDS_OF_ROWS, ROWS, -1.0),
            ValueError,
            "lr must be a finite number, 0 or more, got -1",
        ),
        ("push", (IDS_OF_ROWS, ROWS, float("nan")), ValueError, "lr must be"),
        ("push", (IDS_OF_ROWS, ROWS[:, ::2]), ValueError, "gradients"),
        ("push", (IDS_OF_ROWS, np.asfortranarray(ROWS)), ValueError, "row-major"),
        ("push", (np.array([0, 7]), ROWS), IndexError, "id 7 is out of range.* rows 0 to 4"),
        ("push", (np.array([-1, 0]), ROWS), IndexError, "id -1 is out of range"),
        ("pull", (np.array([5]), ROWS[0]), IndexError, "id 5 is out of range"),
        ("pull", (IDS_OF_ROWS, ROWS[0]), ValueError, "values must hold 2 × 3 elements, got 3"),
        ("pull", ([0, 1], ROWS), TypeError, "ids"),
        (
            "assign",
            (IDS_OF_ROWS, ROWS, ROWS[:1]),
            ValueError,
            "slots must hold 2 × 3 elements, got 3",
        ),
    ],
    ids=str,
)
def test_wrong_calls_change_nothing(
    method: str, arguments: tuple[Any, ...], error: type[Exception], message: str
) -> None:
    values = floats(np.random.default_rng(15), 5, 3)
    table = filled(values, _core.UpdateRule("Adagrad"))
    with pytest.raises(error, match=message):
        getattr(table, method)(*arguments)
    assert table.step == 0
    np.testing.assert_array_equal(pulled(table, np.arange(5)), values)


def test_wrong_calls_of_dense_variables() -> None:
    variable = _core.DenseVariable(ROWS, _core.UpdateRule("Adam"))
    with pytest.raises(IndexError, match="holds 6 elements from 1 on, the variable has 6"):
        variable.assign(1, ROWS)
    with pytest.raises(ValueError, match="slots must hold 12 elements, got 6"):
        variable.assign(0, ROWS, ROWS)
    with pytest.raises(ValueError, match="lr must be"):
        variable.push(0, ROWS, lr=float("inf"))
    with pytest.raises(ValueError, match="begins at a multiple of 16384 elements, got 3"):
        variable.push(3, ROWS[1].copy())
    with pytest.raises(ValueError, match="RowWiseAdagrad updates rows of tables, not dense"):
        _core.DenseVariable(ROWS, _core.UpdateRule("RowWiseAdagrad"))
    assert variable.step == 0


OUT_OF_MEMORY = """
import resource
import numpy as np
import fastdist._core as _core

try:
    _core.RowTable(1024, _core.UpdateRule("SGD"), rows=2**31, memory_bytes=1 << 40)
except MemoryError as error:
    print(error)

table = _core.RowTable(4096, _core.UpdateRule("SGD", lr=1.0))
ones = np.ones((512, 4096), np.float32)
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (256 << 20), resource.RLIM_INFINITY))
pushes = 0
try:
    while True:
        first = pushes * 500  # some rows are there, most are new
        table.push(np.arange(first, first + 512), ones)
        pushes += 1
except MemoryError as error:
    print(error)
resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
assert pushes > 3
out = np.empty((pushes * 500 + 512, 4096), np.float32)
table.pull(np.arange(len(out)), out)
assert (out == out[:, :1]).all()
# The last push was applied to some of its rows.
expected = np.zeros(pushes * 500, np.float32)
for i in range(pushes):
    expected[i * 500 : i * 500 + 512] -= 1
assert (out[: len(expected), 0] == expected).all()
new = out[len(expected) + 12 :, 0]
assert ((new == 0) | (new == -1)).all()
table.push(np.arange(len(out)), out)
print("unharmed")
"""


def test_where_memory_ends_the_table_stays_whole() -> None:
    result = subprocess.run(
        [sys.executable, "-c", OUT_OF_MEMORY], capture_output=True, text=True, check=True
    )
    first, second, last = result.stdout.splitlines()
    assert first.startswith("out of memory: a table's rows need")
    assert second.startswith("out of memory: a table's")
    assert last == "unharmed"
