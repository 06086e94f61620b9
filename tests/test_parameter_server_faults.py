"""Training on parameter servers in spite of lost workers and servers."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fastdist as fd
import numpy as np
import pytest
import torch
from fastdist.errors import FastdistError, UnavailableError
from ps_cluster import PsCluster, wait_for
from served_net import Net, adagrad, batches, make, reference, same, sgd, step
from torch import nn


@pytest.fixture(scope="module")
def cluster() -> Iterator[PsCluster]:
    cluster = PsCluster(workers=2, servers=3)
    yield cluster
    cluster.close()


def test_synchronous_in_spite_of_killed_workers(cluster: PsCluster) -> None:
    strategy = cluster.strategy(synchronous=True)
    coordinator = cluster.coordinator(strategy)
    model, optimizer = make(strategy, sgd)

    def slow(*batch: Any) -> float:
        time.sleep(0.05)
        return step(model, optimizer, *batch)

    values = [coordinator.schedule(slow, batch) for batch in batches(30)]
    time.sleep(0.6)
    cluster.kill("worker", 0)
    cluster.start("worker", 0)
    coordinator.join()
    assert len(coordinator.fetch(values)) == 30
    wait_for(lambda: coordinator.workers == [0, 1])


def test_checkpoints_and_lost_servers(cluster: PsCluster, tmp_path: Path) -> None:
    strategy = cluster.strategy(max_staleness=0)
    coordinator = cluster.coordinator(strategy)
    model, optimizer = make(strategy, adagrad)
    other, other_optimizer = reference(adagrad)
    data = batches(9)
    for batch in data[:3]:
        coordinator.schedule(step, (model, optimizer, *batch))
        step(other, other_optimizer, *batch)
    coordinator.join()
    strategy.save(tmp_path)
    loaded = Net()
    assert fd.checkpoint.load(loaded, tmp_path) == []
    same(loaded, other)
    with pytest.raises(ValueError, match=r"nothing that is called 1/words.weight.*; it has 0/"):
        fd.checkpoint.load(loaded, tmp_path, prefix="1/")
    with pytest.raises(ValueError, match="the module has"):
        fd.checkpoint.load(nn.ModuleDict({"hidden": nn.Linear(3, 3)}), tmp_path)
    for batch in data[3:5]:
        coordinator.schedule(step, (model, optimizer, *batch))
    coordinator.join()
    cluster.kill("ps", 1)
    began = time.monotonic()
    coordinator.schedule(step, (model, optimizer, *data[5]))
    with pytest.raises(UnavailableError, match="server 1"):
        coordinator.join()
    assert time.monotonic() - began < 10
    coordinator.schedule(step, (model, optimizer, *data[5]))
    with pytest.raises(UnavailableError, match="server 1"):  # again, and for the same reason
        coordinator.join()
    cluster.start("ps", 1)
    wait_for(lambda: _restored(strategy, tmp_path))
    for batch in data[3:]:
        coordinator.schedule(step, (model, optimizer, *batch))
        step(other, other_optimizer, *batch)
    coordinator.join()
    same(model, other)


def _restored(strategy: Any, directory: Path) -> bool:
    try:
        strategy.restore(directory)
    except UnavailableError:
        return False
    return True


def test_killed_workers_stop_nothing(cluster: PsCluster) -> None:
    strategy = cluster.strategy()
    coordinator = cluster.coordinator(strategy)
    model, optimizer = make(strategy, adagrad)
    data = batches(4)
    values = [coordinator.schedule(step, (model, optimizer, *data[i % 4])) for i in range(300)]
    for index in (0, 1):
        wait_for(lambda: sum(value.is_done() for value in values) > 20)
        cluster.kill("worker", index)
        cluster.start("worker", index)
        wait_for(lambda: len(coordinator.workers) == 2)
    coordinator.join()
    assert np.mean(coordinator.fetch(values)[-8:]) < 1.0


def test_synchronous_steps_that_fail(cluster: PsCluster) -> None:
    """One worker's gradient is refused, or the servers refuse the step: nobody waits for it."""
    strategy = cluster.strategy(synchronous=True, refuse_nonfinite=True)
    coordinator = cluster.coordinator(strategy)
    with strategy.scope():
        model = nn.ParameterList([nn.Parameter(torch.zeros(2)) for _ in range(4)])
        optimizer = sgd(model.parameters())

    def set_gradients(is_bad: bool) -> None:
        for parameter in model:
            parameter.grad = torch.full_like(parameter, 100.0 if is_bad else 1.0)
        if is_bad:
            model[1].grad[0] = torch.nan

    def train(is_bad: bool, is_stubborn: bool = False) -> str:
        set_gradients(is_bad)
        try:
            optimizer.step()
        except (FastdistError, ValueError) as error:
            if not is_stubborn:
                raise
            set_gradients(False)
            optimizer.step()
            return str(error)
        return ""

    values = [coordinator.schedule(train, (is_bad,)) for is_bad in (True, False)]
    with pytest.raises((ValueError, FastdistError), match="NaN or infinite"):
        coordinator.join()
    for value in values:
        with pytest.raises((ValueError, FastdistError), match="NaN or infinite"):
            value.fetch(20)
    assert all((parameter == 0).all() for parameter in model)
    values = [coordinator.schedule(train, (is_bad, True)) for is_bad in (True, False)]
    refused, other = coordinator.fetch(values, 20)
    coordinator.join()
    assert "NaN or infinite" in refused
    assert "the step of all workers was not taken" in other
    assert "NaN or infinite" in other
    lr = optimizer.param_groups[0]["lr"]
    torch.testing.assert_close(torch.stack(list(model)), torch.full((4, 2), -lr))
    optimizer.param_groups[0]["lr"] = -1.0
    values = [coordinator.schedule(train, (False,)) for _ in range(2)]
    with pytest.raises((ValueError, FastdistError), match="lr must be a finite number"):
        coordinator.join()
    for value in values:
        with pytest.raises((ValueError, FastdistError), match="lr must be a finite number"):
            value.fetch(20)
    for server in range(3):
        assert strategy.client.stats(server)["rounds"] == {"open": 0, "nbytes": 0}
