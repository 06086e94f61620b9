"""TPUStrategy: contexts, reductions, gathers, collectives in a replica, exceptions."""

from __future__ import annotations

from typing import Any

import fastdist as fd
import pytest
import torch
from fastdist import TPUStrategy
from fastdist.errors import UnsupportedError
from torch import nn
from virtual_devices import N, on_devices, traced_id, values_of

pytestmark = on_devices


def test_reduce_of_one_on_each(strategy: TPUStrategy) -> None:
    value = strategy.run(lambda: torch.tensor(1.0))
    with strategy.scope():
        assert strategy.reduce("sum", value) == N
    assert strategy.reduce("mean", value) == 1
    assert strategy.reduce("sum", strategy.run(lambda: 1.0)) == N
    ids = strategy.run(traced_id)
    assert strategy.reduce("sum", ids) == N * (N - 1) // 2
    assert strategy.reduce("mean", ids) == (N - 1) / 2
    assert strategy.reduce("max", ids) == N - 1
    assert strategy.reduce("min", ids) == 0
    assert [int(i) for i in strategy.local_results(ids)] == list(range(N))
    assert strategy.reduce_to("sum", ids, "cpu").device.type == "cpu"
    with pytest.raises(ValueError, match="got 'average'"):
        strategy.reduce("average", 1.0)  # type: ignore[arg-type]


def test_reduce_along_an_axis(strategy: TPUStrategy) -> None:
    value = strategy.run(lambda: torch.tensor([1.0, 2.0]) + traced_id() * 0)
    assert strategy.reduce("mean", value, axis=0) == 1.5
    assert strategy.reduce("sum", value, axis=0) == 3 * N
    assert strategy.reduce("sum", value).tolist() == [N, 2 * N]
    ragged = strategy.distribute_values_from_function(
        lambda c: torch.arange(c.replica_id_in_sync_group + 1.0)
    )
    rows = [float(x) for r in range(N) for x in range(r + 1)]
    assert float(strategy.reduce("mean", ragged, axis=0)) == pytest.approx(sum(rows) / len(rows))


def test_all_reduce_and_its_gradient(strategy: TPUStrategy) -> None:
    def step() -> Any:
        context = fd.get_replica_context()
        assert context is not None
        x = (torch.tensor([1.0, 2.0]).to(context.device) + traced_id() * 0).requires_grad_()
        total = context.all_reduce("sum", x)
        total.backward(torch.stack([torch.ones_like(total[0]), traced_id() * 1.0]))
        several = context.all_reduce("max", {"id": traced_id(), "one": 1.0})
        return total.detach(), x.grad, context.all_reduce("mean", traced_id()), several

    total, gradient, mean, several = strategy.run(step)
    for t, g, m, i, one in zip(
        *map(strategy.local_results, (total, gradient, mean, several["id"], several["one"])),
        strict=False,
    ):
        assert t.tolist() == [N, 2 * N]
        assert g.tolist() == [N, N * (N - 1) / 2]
        assert (m, i, one) == ((N - 1) / 2, N - 1, 1)


def test_all_gather_and_its_gradient(strategy: TPUStrategy) -> None:
    def step() -> Any:
        context = fd.get_replica_context()
        assert context is not None
        x = (torch.ones(2, 3).to(context.device) * traced_id()).requires_grad_()
        joined = context.all_gather(x, axis=1)
        weights = torch.arange(6.0 * N).reshape(2, 3 * N).to(context.device)
        joined.backward(weights)
        with pytest.raises(ValueError, match="at least one dimension"):
            context.all_gather(traced_id())
        return joined.detach(), x.grad

    joined, gradient = strategy.run(step)
    weights = torch.arange(6.0 * N).reshape(2, 3 * N)
    rows = zip(strategy.local_results(joined), strategy.local_results(gradient), strict=True)
    for own, (j, g) in enumerate(rows):
        assert j[0].tolist() == [float(r) for r in range(N) for _ in range(3)]
        assert g.tolist() == (N * weights[:, 3 * own : 3 * own + 3]).tolist()


def test_gather(strategy: TPUStrategy) -> None:
    value = strategy.run(lambda: torch.ones(2, 1, device="xla") * traced_id())
    assert strategy.gather(value).flatten().tolist() == [float(r) for r in range(N) for _ in "ab"]
    assert strategy.gather(value, axis=1).shape == (2, N)
    ragged = strategy.distribute_values_from_function(
        lambda c: torch.full((c.replica_id_in_sync_group + 1, 1), c.replica_id_in_sync_group)
    )
    expected = [r for r in range(N) for _ in range(r + 1)]
    assert strategy.gather(ragged).flatten().tolist() == expected
    with pytest.raises(ValueError, match="at least one dimension"):
        strategy.gather(strategy.run(traced_id))
    if N > 1:
        with pytest.raises(ValueError, match=r"\(2, 1\)"):
            strategy.gather(ragged, axis=1)
        with pytest.raises(ValueError, match=r"differ in shape or dtype, \[\(1, 1\), \(2, 1\)"):
            strategy.run(lambda x: x, (ragged,))


def test_contexts(strategy: TPUStrategy) -> None:
    with strategy.scope(), strategy.scope():
        assert fd.get_strategy() is strategy
        assert fd.get_replica_context() is None
        assert isinstance(strategy, fd.Strategy)
        with pytest.raises(RuntimeError, match="Mixing"):
            fd.OneDeviceStrategy("cpu").scope().__enter__()
    with fd.OneDeviceStrategy("cpu").scope(), pytest.raises(RuntimeError, match="Mixing"):
        strategy.run(lambda: None)
    with pytest.raises(ValueError, match="args must be a tuple or list, got Tensor"):
        strategy.run(lambda x: x, torch.ones(2))  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="run was called inside run"):
        strategy.run(lambda: strategy.run(lambda: None))
    assert values_of(strategy, lambda: fd.get_replica_context().num_replicas_in_sync) == [N] * N


def test_an_exception_leaves_the_strategy_usable(strategy: TPUStrategy) -> None:
    with strategy.scope():
        model = nn.Linear(2, 1)

    def failing() -> None:
        model(torch.ones(1, 2, device="xla")).sum().backward()
        raise KeyError("lost")

    with pytest.raises(KeyError, match="lost") as caught:
        strategy.run(failing)
    assert any(entry.name == "failing" for entry in caught.traceback)
    assert model.weight.grad is not None
    assert model.weight.grad.tolist() == [[1.0, 1.0]]
    assert strategy.reduce("sum", strategy.run(traced_id)) == N * (N - 1) // 2
    assert torch.autograd._engine_run_backward.__module__ == "torch.autograd.graph"  # type: ignore[attr-defined]


@pytest.mark.skipif(N == 1, reason="one device's values can be read")
@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.sum().item(),
        lambda x: float(x[0]),
        lambda x: x if x.sum() > 0 else -x,
        lambda x: x.cpu(),
        lambda x: x.to("cpu"),
        lambda x: torch.zeros(3).copy_(x),
        lambda x: x[x > 1],
        lambda x: x.unique(),
        lambda x: x.nonzero(),
    ],
)
def test_values_are_not_there_while_tracing(strategy: TPUStrategy, read: Any) -> None:
    x = strategy.distribute_values_from_function(
        lambda c: torch.full((3,), c.replica_id_in_sync_group + 1.0)
    )
    kept = []

    def step(x: torch.Tensor) -> torch.Tensor:
        kept.append(x * 2)
        assert str(x) == f"{x}" == "<traced tensor of shape (3,)>"
        return read(x)  # type: ignore[no-any-return]

    with pytest.raises(UnsupportedError, match="values while run traces its function"):
        strategy.run(step, (x,))
    assert kept[0].tolist() == [2.0] * 3
    assert strategy.reduce("sum", strategy.run(traced_id)) == N * (N - 1) // 2


def test_merge_call(strategy: TPUStrategy) -> None:
    with strategy.scope():
        model = nn.Linear(1, 1, bias=False)

    def merged(given: fd.Strategy, value: Any, scale: float) -> Any:
        assert fd.in_cross_replica_context()
        assert given is strategy
        with torch.no_grad():
            model.weight.fill_(3.0)
        return given.reduce("sum", value) * scale

    def step() -> Any:
        context = fd.get_replica_context()
        assert context is not None
        result = context.merge_call(merged, args=(traced_id() * 1.0,), kwargs={"scale": 2.0})
        assert fd.get_replica_context() is context
        return result + model.weight[0, 0].detach() * traced_id()

    expected = [N * (N - 1) + 3.0 * i for i in range(N)]
    assert values_of(strategy, step) == expected
    assert model.weight.item() == 3.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"steps_per_execution": 0}, "steps_per_execution must be positive, got 0"),
        ({"gradient_reduction": "max"}, 'gradient_reduction must be "mean" or "sum"'),
    ],
)
def test_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TPUStrategy(**arguments)
