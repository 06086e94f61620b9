"""`ClusterCoordinator.run`: steps that outlive servers and the chief."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fastdist as fd
import pytest
import torch
from ps_cluster import PsCluster
from torch import nn


@pytest.fixture
def cluster() -> Iterator[PsCluster]:
    cluster = PsCluster(workers=2, servers=2)
    yield cluster
    cluster.close()


def counting(strategy: Any) -> tuple[Any, Any, Any, Any]:
    """A model, its optimizer, a function each of whose calls adds 1 to all elements, and a table.

    Each call also adds 1 to a row of the table, mostly a new one.
    """
    with strategy.scope():
        model = nn.ParameterList([nn.Parameter(torch.zeros(2)) for _ in range(3)])
        table = fd.nn.Embedding(None, 1, initializer=("constant", 0.0, 0.0))
        optimizer = torch.optim.SGD([*model.parameters(), *table.parameters()], lr=1.0)

    def train() -> None:
        optimizer.zero_grad()
        row = table(model[0][:1].detach().long())
        (sum(parameter.sum() for parameter in model) + row.sum()).neg().backward()
        optimizer.step()

    return model, optimizer, train, table


@pytest.mark.slow
def test_a_lost_server_costs_the_steps_since_the_checkpoint(
    cluster: PsCluster, tmp_path: Path
) -> None:
    strategy = cluster.strategy()
    model, _optimizer, train, table = counting(strategy)
    coordinator = cluster.coordinator(strategy)
    state: dict[str, Any] = {"seen": []}
    reached = []
    for step in coordinator.run(train, steps=22, directory=tmp_path, save_every=5, state=state):
        assert [p.tolist() for p in model] == [[float(step)] * 2] * 3
        assert table(torch.arange(22)).sum() == step
        state["seen"].append(step)
        reached.append(step)
        if reached == [5, 10, 15]:
            cluster.kill("ps", 1)
            cluster.start("ps", 1)
    assert reached == [5, 10, 15, 15, 20, 22]
    assert state == {"seen": [5, 10, 15, 20, 22], "step": 22}
    assert fd.ps.load(tmp_path).state == state


@pytest.mark.slow
def test_the_next_chief_continues(cluster: PsCluster, tmp_path: Path) -> None:
    found: list[int] = []
    for steps in (7, 12, 12):
        strategy = cluster.strategy()  # as that of a chief that is started again
        model, _optimizer, train, _table = counting(strategy)
        coordinator = cluster.coordinator(strategy)
        state: dict[str, Any] = {}
        given = {"directory": tmp_path, "save_every": 5, "state": state}
        found += coordinator.run(train, steps=steps, **given)
        assert state == {"step": steps}
        assert [p.tolist() for p in model] == [[float(steps)] * 2] * 3
        del coordinator
    assert found == [5, 7, 12]


@pytest.mark.slow
def test_mistakes(cluster: PsCluster, tmp_path: Path) -> None:
    strategy = cluster.strategy()
    _model, _optimizer, train, _table = counting(strategy)
    coordinator = cluster.coordinator(strategy)
    for wrong in ({"steps": -1}, {"steps": 1, "save_every": 0}):
        with pytest.raises(ValueError, match=r"must be (0 or more|at least 1), got"):
            coordinator.run(train, directory=tmp_path, **wrong)
    with pytest.raises(ValueError, match="args must be a tuple or list"):
        coordinator.run(train, 5, steps=1, directory=tmp_path)  # type: ignore[arg-type]
    strategy.save(tmp_path, [1])
    with pytest.raises(ValueError, match="has no checkpoint of ClusterCoordinator"):
        list(coordinator.run(train, steps=1, directory=tmp_path))

    def fails() -> None:
        raise ZeroDivisionError("the function's own")

    with pytest.raises(ZeroDivisionError, match="the function's own"):
        list(coordinator.run(fails, steps=1, directory=tmp_path / "other"))
    assert list(coordinator.run(train, steps=3, directory=tmp_path / "other")) == [3]
