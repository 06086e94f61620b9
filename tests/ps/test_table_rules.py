"""Update rules of tables against torch.optim."""

from __future__ import annotations

import itertools
from copy import deepcopy
from typing import Any

import fastdist._core as _core
import numpy as np
import numpy.typing as npt
import pytest
import torch
from fastdist.ps import RowWiseAdagrad
from row_tables import Floats, Given, Ids, filled, floats, pulled, push_all, slots_of

Doubles = npt.NDArray[np.float64]


def every(**choices: tuple[Any, ...]) -> list[Given]:
    """Every combination of the choices."""
    values = itertools.product(*choices.values())
    return [dict(zip(choices, chosen, strict=True)) for chosen in values]


BETAS = ((0.9, 0.999), (0.0, 0.5), (0.6, 0.99))
ADAGRAD: list[Given] = every(
    lr=(0.1,),
    lr_decay=(0, 0.1),
    weight_decay=(0, 0.1),
    initial_accumulator_value=(0, 0.5),
    eps=(1e-10, 1e-3),
    maximize=(False, True),
)
RULES: list[tuple[str, Given]] = [
    *(("SGD", c) for c in every(lr=(0.1,), weight_decay=(0, 0.1), maximize=(False, True))),
    *(
        ("SGD", c)
        for c in every(
            lr=(0.05,),
            momentum=(0.9, 0.3),
            dampening=(0, 0.4, 1),
            weight_decay=(0, 0.1),
            maximize=(False, True),
        )
    ),
    *(
        ("SGD", c)
        for c in every(lr=(0.1,), momentum=(0.9, 0.5), nesterov=(True,), weight_decay=(0, 0.1))
    ),
    *(("Adagrad", c) for c in ADAGRAD),
    *(
        (name, c)
        for name in ("Adam", "AdamW")
        for c in every(
            lr=(0.01,),
            betas=BETAS,
            eps=(1e-8, 1e-3),
            weight_decay=(0, 0.1),
            maximize=(False, True),
        )
    ),
    *(
        ("RMSprop", c)
        for c in every(
            lr=(0.01,),
            alpha=(0.99, 0.5),
            eps=(1e-8, 1e-3),
            weight_decay=(0, 0.1),
            momentum=(0, 0.9),
            centered=(False, True),
            maximize=(False, True),
        )
    ),
    ("SGD", {}),
    ("Adagrad", {}),
    ("Adam", {}),
    ("AdamW", {}),
    ("RMSprop", {}),
]


def name_of(case: Any) -> str:
    return ",".join(f"{k}={v}" for k, v in case.items()) if isinstance(case, dict) else str(case)


@pytest.mark.parametrize(("name", "given"), RULES, ids=name_of)
def test_dense_steps_are_those_of_torch(name: str, given: Given) -> None:
    rng = np.random.default_rng(1)
    initial = floats(rng, 203)  # not a multiple of any vector
    parameter = torch.nn.Parameter(torch.from_numpy(initial.copy()))
    optimizer = getattr(torch.optim, name)([parameter], foreach=False, **given)
    variable = _core.DenseVariable(initial, _core.UpdateRule(name, **given))
    out = np.empty_like(initial)
    for _ in range(20):
        gradient = floats(rng, initial.size)
        parameter.grad = torch.from_numpy(gradient)
        optimizer.step()
        push_all(variable, gradient)
        variable.pull(0, out)
        np.testing.assert_allclose(out, parameter.detach().numpy(), rtol=1e-6, atol=1e-6)
    assert variable.step == 20


@pytest.mark.parametrize("name", ["SGD", "Adagrad", "Adam", "RMSprop"])
def test_a_large_variable_is_as_its_parts(name: str) -> None:
    rng = np.random.default_rng(16)
    initial = floats(rng, 3 * 16384 + 1001)  # more than one chunk
    rule = _core.UpdateRule(name)
    cuts = [5000, 16384, 40_000]
    parts = [_core.DenseVariable(part, rule) for part in np.split(initial, cuts)]
    whole = _core.DenseVariable(initial, rule)
    for _ in range(3):
        gradient = floats(rng, initial.size)
        push_all(whole, gradient)
        for part, piece in zip(parts, np.split(gradient, cuts), strict=True):
            push_all(part, piece)
    out, expected = np.empty_like(initial), np.empty_like(initial)
    whole.pull(0, out)
    for part, piece in zip(parts, np.split(expected, cuts), strict=True):
        part.pull(0, piece)
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize(("name", "given"), RULES, ids=name_of)
def test_a_step_on_all_rows_is_a_dense_step(name: str, given: Given) -> None:
    """All but Adam, which on rows is SparseAdam."""
    if name == "Adam":
        given = {**given, "eps": 0}
    rng = np.random.default_rng(2)
    initial = floats(rng, 9, 7)
    rule = _core.UpdateRule(name, **given)
    variable, table = _core.DenseVariable(initial, rule), filled(initial, rule)
    out = np.empty_like(initial)
    for step in range(5):
        gradient = floats(rng, 9, 7)
        push_all(variable, gradient, lr=0.1 / (step + 1))
        order = rng.permutation(9)
        table.push(order, gradient[order], lr=0.1 / (step + 1))
        variable.pull(0, out)
        np.testing.assert_allclose(pulled(table, np.arange(9)), out, rtol=1e-6, atol=1e-6)


def sparse_gradient(ids: Ids, gradients: Floats, rows: int) -> torch.Tensor:
    return torch.sparse_coo_tensor(
        torch.from_numpy(ids)[None],
        torch.from_numpy(gradients),
        (rows, gradients.shape[1]),
        check_invariants=True,
    )


SPARSE: list[tuple[str, str, Given]] = [
    *(("SGD", "SGD", c) for c in every(lr=(0.1,), maximize=(False, True))),
    *(
        ("Adagrad", "Adagrad", c)
        for c in every(
            lr=(0.1,), lr_decay=(0, 0.1), initial_accumulator_value=(0, 0.5), eps=(1e-10, 1e-3)
        )
    ),
    *(
        ("Adam", "SparseAdam", c)
        for c in every(lr=(0.01,), betas=BETAS, eps=(1e-8, 1e-3), maximize=(False, True))
    ),
]


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # torch's own sparse tensors
@pytest.mark.parametrize("hashed", [False, True])
@pytest.mark.parametrize(("name", "torch_name", "given"), SPARSE, ids=name_of)
def test_sparse_steps_are_those_of_torch(
    name: str, torch_name: str, given: Given, hashed: bool
) -> None:
    rng = np.random.default_rng(3)
    rows, dim = 300, 10
    initial = floats(rng, rows, dim)
    parameter = torch.nn.Parameter(torch.from_numpy(initial.copy()))
    optimizer = getattr(torch.optim, torch_name)([parameter], **given)
    table = _core.RowTable(dim, _core.UpdateRule(name, **given), rows=None if hashed else rows)
    table.assign(np.arange(rows), initial)
    for step in range(20):
        # With repeated ids; sometimes none at all, which is a step too.
        ids = rng.integers(0, rows, 0 if step == 7 else 200)
        gradients = floats(rng, ids.size, dim)
        parameter.grad = sparse_gradient(ids, gradients, rows)
        optimizer.step()
        table.push(ids, gradients)
        np.testing.assert_allclose(
            pulled(table, np.arange(rows)), parameter.detach().numpy(), rtol=1e-6, atol=1e-6
        )


def row_wise_step(
    values: Doubles, sums: Doubles, ids: Ids, gradients: Floats, step: int, given: Given
) -> None:
    """Take a step of row-wise Adagrad in float64, as FBGEMM defines it."""
    total = np.zeros_like(values)
    np.add.at(total, ids, gradients)
    rows = np.unique(ids)
    gradient = (-1 if given["maximize"] else 1) * total[rows] + given["weight_decay"] * values[rows]
    sums[rows] += (gradient**2).mean(1)
    rate = given["lr"] / (1 + (step - 1) * given["lr_decay"])
    values[rows] -= rate * gradient / (np.sqrt(sums[rows])[:, None] + given["eps"])


@pytest.mark.slow
@pytest.mark.parametrize("hashed", [False, True])
@pytest.mark.parametrize("dim", [1, 10, 16, 75])
@pytest.mark.parametrize("given", ADAGRAD, ids=name_of)
def test_row_wise_steps_are_those_of_float64(given: Given, dim: int, hashed: bool) -> None:
    rng = np.random.default_rng(17)
    rows = 60
    ids_of_rows = rng.integers(0, 2**63, rows) if hashed else np.arange(rows)
    rule = _core.UpdateRule("RowWiseAdagrad", **given)
    table = _core.RowTable(dim, rule, rows=None if hashed else rows)
    initial = floats(rng, rows, dim)
    table.assign(ids_of_rows, initial)
    values = initial.astype(np.float64)
    sums = np.full(rows, given["initial_accumulator_value"], np.float64)
    for step in range(1, 16):
        # With repeated ids; sometimes none at all, which is a step too.
        ids = rng.integers(0, rows, 0 if step == 7 else 40)
        gradients = floats(rng, ids.size, dim)
        table.push(ids_of_rows[ids], gradients)
        row_wise_step(values, sums, ids, gradients, step, given)
        np.testing.assert_allclose(pulled(table, ids_of_rows), values, rtol=1e-5, atol=1e-5)
    assert rule.slots == table.slots == ["row_sum"]
    assert table.slot_floats == 1
    np.testing.assert_allclose(slots_of(table, ids_of_rows)[:, 0, 0], sums, rtol=1e-5)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # torch's own sparse tensors
@pytest.mark.parametrize("is_sparse", [False, True])
@pytest.mark.parametrize("given", ADAGRAD, ids=name_of)
def test_row_wise_adagrad_in_one_process(given: Given, is_sparse: bool) -> None:
    """Dense gradients touch all rows."""
    rng = np.random.default_rng(18)
    rows, dim = 20, 6
    values = rng.standard_normal((rows, dim))
    sums = np.full(rows, given["initial_accumulator_value"], np.float64)
    parameter = torch.nn.Parameter(torch.from_numpy(values.copy()))
    optimizer = RowWiseAdagrad([parameter], **given)
    for step in range(1, 6):
        ids = rng.integers(0, rows, 15) if is_sparse else rng.permutation(rows)
        gradients = floats(rng, ids.size, dim)
        sparse = sparse_gradient(ids, gradients.astype(np.float64), rows)
        parameter.grad = sparse if is_sparse else sparse.to_dense()
        optimizer.step()
        row_wise_step(values, sums, ids, gradients, step, given)
    np.testing.assert_allclose(parameter.detach(), values, rtol=1e-12)
    np.testing.assert_allclose(optimizer.state[parameter]["row_sum"][:, 0], sums, rtol=1e-12)
    copy = RowWiseAdagrad([torch.nn.Parameter(parameter.detach().clone())], **given)
    copy.load_state_dict(deepcopy(optimizer.state_dict()))
    copy.param_groups[0]["params"][0].grad = parameter.grad
    assert copy.step(lambda: 3) == 3
    optimizer.step()
    assert torch.equal(copy.param_groups[0]["params"][0], parameter)


def test_parameters_that_row_wise_adagrad_rejects() -> None:
    with pytest.raises(ValueError, match=r"\[rows, dim\], got a parameter of shape \(3,\)"):
        RowWiseAdagrad([torch.nn.Parameter(torch.zeros(3))])
    with pytest.raises(ValueError, match="RowWiseAdagrad's lr must be a finite number"):
        RowWiseAdagrad([torch.nn.Parameter(torch.zeros(3, 2))], lr=-1.0)


@pytest.mark.parametrize(
    ("name", "given"), [*RULES, *(("RowWiseAdagrad", given) for given in ADAGRAD)], ids=name_of
)
def test_rows_that_are_not_touched_stay(name: str, given: Given) -> None:
    rng = np.random.default_rng(4)
    initial = floats(rng, 50, 4)
    table = filled(initial, _core.UpdateRule(name, **given))
    touched = rng.choice(50, 20, replace=False)
    others = np.setdiff1d(np.arange(50), touched)
    before = slots_of(table, others)
    for _ in range(3):
        table.push(touched, floats(rng, 20, 4))
    np.testing.assert_array_equal(pulled(table, others), initial[others])
    np.testing.assert_array_equal(slots_of(table, others), before)
    assert (pulled(table, touched) != initial[touched]).any()


def test_slots_are_torchs_state() -> None:
    rng = np.random.default_rng(5)
    initial = floats(rng, 6, 3)
    parameter = torch.nn.Parameter(torch.from_numpy(initial.copy()))
    optimizer = torch.optim.Adam([parameter])
    rule = _core.UpdateRule("Adam")
    variable, table = _core.DenseVariable(initial, rule), filled(initial, rule)
    for _ in range(3):
        gradient = floats(rng, 6, 3)
        parameter.grad = torch.from_numpy(gradient)
        optimizer.step()
        push_all(variable, gradient)
        table.push(np.arange(6), gradient)
    assert rule.slots == table.slots == ["exp_avg", "exp_avg_sq"]
    dense = np.empty((2, 6, 3), np.float32)
    assert variable.read_state(np.empty_like(initial), dense) == 3
    rows = slots_of(table, np.arange(6))
    for i, slot in enumerate(rule.slots):
        expected = optimizer.state[parameter][slot].numpy()
        np.testing.assert_allclose(dense[i], expected, rtol=1e-6, atol=1e-7)
        np.testing.assert_allclose(rows[:, i], expected, rtol=1e-6, atol=1e-7)


def test_the_learning_rate_of_a_push_counts_for_that_push() -> None:
    table = filled(np.zeros((1, 1), np.float32))
    one = np.ones((1, 1), np.float32)
    for lr in (None, 0.25, None, 0.0):
        table.push(np.array([0]), one, lr=lr)
    assert pulled(table, [0]) == -1.25


def test_equal_ids_are_summed_before_the_step() -> None:
    table = filled(np.zeros((3, 2), np.float32), _core.UpdateRule("Adagrad", lr=1.0))
    ids = np.array([1, 0, 1, 1])
    table.push(ids, np.array([[1, 2], [1, 1], [10, 20], [100, 200]], np.float32))
    np.testing.assert_array_equal(slots_of(table, [1])[0, 0], [111**2, 222**2])
    np.testing.assert_array_equal(slots_of(table, [2])[0, 0], [0, 0])
