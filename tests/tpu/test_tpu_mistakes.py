"""TPUStrategy: wrong use, its errors, and training that continues correctly."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import fastdist as fd
import pytest
import torch
from fastdist import PerReplica, TPUStrategy
from fastdist.errors import UnsupportedError
from torch import nn
from virtual_devices import N, on_devices, traced_id

pytestmark = on_devices


def test_uneven_batches_of_different_datasets_in_one_run(strategy: TPUStrategy) -> None:
    a = list(strategy.distribute_dataset(torch.arange(7.0), global_batch_size=4))
    b = list(strategy.distribute_dataset(torch.arange(6.0), global_batch_size=4))

    def dot(x: torch.Tensor, y: torch.Tensor) -> Any:
        return x.sum() + y.sum()

    assert strategy.reduce("sum", strategy.run(dot, (a[0], b[0]))) == 12
    with pytest.raises(UnsupportedError, match="batches of different numbers of examples"):
        strategy.run(dot, (a[1], b[1]))
    assert strategy.reduce("sum", strategy.run(dot, (a[1], a[1]))) == 2 * (4 + 5 + 6)


def test_replicas_without_examples_change_nothing(strategy: TPUStrategy) -> None:
    """Including a batch without examples."""
    with strategy.scope():
        model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    none = PerReplica(tuple(torch.zeros(0, 2) for _ in range(N)), (0,) * N)
    before = [t.detach().cpu().clone() for t in (*model.parameters(), *model.buffers())]
    some = PerReplica(
        tuple(torch.ones(2 if i == 0 else 0, 2) for i in range(N)), (2,) + (0,) * (N - 1)
    )
    strategy.run(step, (some,))
    tensors = [*model.parameters(), *model.buffers()]
    assert all(torch.isfinite(t).all() for t in tensors)
    after = [t.detach().cpu().clone() for t in tensors]
    assert any(not torch.equal(one, other) for one, other in zip(before, after, strict=True))
    strategy.check_in_sync()
    rows = strategy.distribute_dataset(torch.zeros(2 * N, 2), global_batch_size=2 * N)
    assert len(list(rows)) == 1
    strategy.run(lambda x: x * 2, (none,))


def test_an_exception_after_the_optimizer_has_stepped(strategy: TPUStrategy) -> None:
    """Changes made before the exception remain, equally on all replicas."""
    with strategy.scope():
        model = nn.Linear(2, 1, bias=False)
        model.weight.data.fill_(1.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

    def step(fails: bool) -> None:
        optimizer.zero_grad()
        (model.weight * (traced_id() + 1.0)).sum().backward()
        optimizer.step()
        if fails:
            raise ZeroDivisionError("after the step")

    with pytest.raises(ZeroDivisionError, match="after the step"):
        strategy.run(step, (True,))
    mean = (N + 1) / 2
    assert model.weight.tolist() == [[1 - 0.5 * mean] * 2]
    strategy.run(step, (False,))
    assert model.weight.tolist() == [[1 - mean] * 2]
    strategy.check_in_sync()


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        (lambda: PerReplica(("a",) * N), TypeError, "tensors and numbers of their own, got"),
        (
            lambda: PerReplica(tuple(torch.ones(1 + i) for i in range(N))),
            ValueError,
            "differ in shape or dtype",
        ),
        (
            lambda: PerReplica((torch.ones(1).int(), *[torch.ones(1)] * (N - 1))),
            ValueError,
            "differ in shape or dtype",
        ),
        (lambda: PerReplica((1.0,) * (N + 1)), ValueError, f"expected {N} values, .* got {N + 1}"),
    ],
)  # fmt: skip
@pytest.mark.skipif(N == 1, reason="one replica's value is what it is")
def test_values_that_no_program_takes(
    strategy: TPUStrategy, value: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        strategy.run(lambda x: x, (value(),))
    assert strategy.reduce("sum", strategy.run(traced_id)) == N * (N - 1) // 2


def test_a_model_of_another_strategy(strategy: TPUStrategy) -> None:
    """Two strategies have the same devices, so a model may be used by both."""
    with strategy.scope():
        model = nn.Linear(2, 1)
    other = TPUStrategy()
    result = other.run(lambda: model(torch.ones(1, 2, device="xla")).sum().detach())
    expected = float(model(torch.ones(1, 2, device="xla")).detach())
    assert [float(x) for x in other.local_results(result)] == pytest.approx([expected] * N)


@pytest.mark.filterwarnings("ignore:run of .* was compiled again")
def test_steps_per_execution_with_a_rest() -> None:
    """Seven runs, three per program; results that are read early are computed separately."""
    strategy = TPUStrategy(steps_per_execution=3)
    with strategy.scope():
        v = fd.Variable(0.0, aggregation=fd.VariableAggregation.SUM)
    results = [strategy.run(lambda: v.value.clone()) for _ in range(2)]
    for _ in range(5):
        results.append(strategy.run(lambda: v.assign_add(1.0)))
    strategy.synchronize()
    assert float(v.value) == 5 * N
    assert float(strategy.local_results(results[0])[0]) == 0


def test_a_backward_on_the_cpu_came_first() -> None:
    """The first backward of the process ran before torch knew XLA's devices."""
    script = """
import torch
(torch.ones(2, requires_grad=True) * 2).sum().backward()
import fastdist as fd
strategy = fd.TPUStrategy()
with strategy.scope():
    model = torch.nn.Linear(2, 1)
def step(x):
    model(x).sum().backward()
(batch,) = strategy.distribute_dataset(torch.ones(8, 2), global_batch_size=8)
strategy.run(step, (batch,))
print(model.bias.grad.cpu().tolist())
"""
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == str([8.0 / N])  # the mean of the replicas' sums
