"""Training on parameter servers with lost workers and servers."""

import gc
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fastdist as fd
import numpy as np
import pytest
import torch
from fastdist.errors import FastdistError, UnavailableError
from fastdist.ps.client.sharded import commit_round
from fastdist.ps.model import model as served_model
from launched import wait_until
from marks import slow
from ps_cluster import PsCluster
from served_net import Net, adagrad, batches, make, reference, same, sgd, step
from torch import nn


@pytest.fixture(scope="module")
def cluster() -> Iterator[PsCluster]:
    cluster = PsCluster(workers=2, servers=3)
    yield cluster
    cluster.close()


@pytest.mark.slow
def test_synchronous_with_killed_workers(cluster: PsCluster) -> None:
    strategy = cluster.strategy(synchronous=True)
    coordinator = cluster.coordinator(strategy)
    model, optimizer = make(strategy, sgd)

    def step_slowly(*batch: Any) -> float:
        time.sleep(0.05)
        return step(model, optimizer, *batch)

    values = [coordinator.schedule(step_slowly, batch) for batch in batches(30)]
    time.sleep(0.6)
    cluster.kill("worker", 0)
    cluster.start("worker", 0)
    coordinator.join()
    assert len(coordinator.fetch(values)) == 30
    wait_until(lambda: coordinator.workers == [0, 1])


@pytest.mark.slow
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
    assert fd.ps.load(loaded, tmp_path) == []
    same(loaded, other)
    with pytest.raises(ValueError, match=r"nothing called 1/words.weight.*; it has 0/"):
        fd.ps.load(loaded, tmp_path, prefix="1/")
    with pytest.raises(ValueError, match="the module has"):
        fd.ps.load(nn.ModuleDict({"hidden": nn.Linear(3, 3)}), tmp_path)
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
    with pytest.raises(UnavailableError, match="server 1"):  # fails again for the same reason
        coordinator.join()
    cluster.start("ps", 1)
    wait_until(lambda: _restored(strategy, tmp_path))
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


@pytest.mark.slow
def test_killed_workers_stop_nothing(cluster: PsCluster) -> None:
    strategy = cluster.strategy()
    coordinator = cluster.coordinator(strategy)
    model, optimizer = make(strategy, adagrad)
    data = batches(4)
    values = [coordinator.schedule(step, (model, optimizer, *data[i % 4])) for i in range(300)]
    for index in (0, 1):
        wait_until(lambda: sum(value.is_done() for value in values) > 20)
        cluster.kill("worker", index)
        cluster.start("worker", index)
        wait_until(lambda: len(coordinator.workers) == 2)
    coordinator.join()
    assert np.mean(coordinator.fetch(values)[-8:]) < 1.0


@pytest.mark.slow
@pytest.mark.parametrize("lost", ["who commits", "another"])
def test_a_worker_that_is_lost_in_a_commit(cluster: PsCluster, tmp_path: Path, lost: str) -> None:
    """All workers had staged their gradients: all servers apply the step once."""
    strategy = cluster.strategy(synchronous=True)
    coordinator = cluster.coordinator(strategy)
    with strategy.scope():
        model = nn.ParameterList([nn.Parameter(torch.zeros(2)) for _ in range(3)])
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    begun, is_over = tmp_path / "begun", tmp_path / "over"

    def cut_off(client: Any, round: int, things: Any, **options: Any) -> Any:
        """Commit on one server only; then lose the worker or the other server."""
        if begun.exists():
            return commit_round(client, round, things, **options)
        begun.write_text(str(fd.get_worker_index()))
        commit_round(client, round, things[:1], **options)
        if lost == "who commits":
            os.kill(os.getpid(), signal.SIGKILL)
        while not is_over.exists():
            time.sleep(0.01)
        return commit_round(client, round, things, **options)

    def train(gradient: float) -> float:
        served_model.commit_round = cut_off
        for parameter in model:
            parameter.grad = torch.full_like(parameter, gradient)
        optimizer.step()
        served_model.commit_round = commit_round
        return gradient

    values = [coordinator.schedule(train, (gradient,)) for gradient in (1.0, 3.0)]
    with ThreadPoolExecutor(1) as pool:
        ended = pool.submit(coordinator.join)  # starts the group
        wait_until(lambda: begun.exists() and begun.read_text())
        leader = int(begun.read_text())
        victim = leader if lost == "who commits" else 1 - leader
        cluster.kill("worker", victim)
        wait_until(lambda: victim not in coordinator.workers)
        is_over.touch()
        ended.result(60)
    assert coordinator.fetch(values) == [1.0, 3.0]
    # The lost worker's function ran again, alone.
    again = [1.0, 3.0][victim]
    assert [parameter.tolist() for parameter in model] == [[-2.0 - again] * 2] * 3
    cluster.start("worker", victim)
    wait_until(lambda: len(coordinator.workers) == 2)
    for server in range(3):
        assert strategy.client.stats(server)["rounds"] == {"open": 0, "nbytes": 0}


@pytest.mark.slow
@pytest.mark.parametrize("mode", [{}, {"synchronous": True}, {"max_staleness": 1}])
def test_checkpoints_during_functions(
    cluster: PsCluster, tmp_path: Path, mode: dict[str, Any]
) -> None:
    """A checkpoint has each function as a whole on all servers, or not at all."""
    strategy = cluster.strategy(**mode)
    coordinator = cluster.coordinator(strategy)
    with strategy.scope():
        model = nn.ParameterList([nn.Parameter(torch.zeros(1000)) for _ in range(3)])
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

    def train() -> None:
        for _ in range(2):
            optimizer.zero_grad()
            sum(parameter.sum() for parameter in model).neg().backward()
            optimizer.step()

    counts, amid = [], 0
    for _ in range(4):
        values = [coordinator.schedule(train) for _ in range(20)]
        wait_until(values[2].is_done)
        strategy.save(tmp_path)
        amid += not values[-1].is_done()
        saved = nn.ParameterList([nn.Parameter(torch.ones(1000)) for _ in range(3)])
        fd.ps.load(saved, tmp_path)
        (count,) = {value.item() for parameter in saved for value in parameter.unique()}
        counts.append(count)
    coordinator.join()
    assert amid
    assert counts == sorted(counts)
    assert all(count % 2 == 0 for count in counts)
    assert counts[0] > 0
    coordinator.schedule(time.sleep, (2.0,))
    with pytest.raises(FastdistError, match="1 scheduled functions have not ended; join first"):
        strategy.restore(tmp_path)
    coordinator.join()
    strategy.restore(tmp_path)
    assert model[0][0].item() == counts[-1]


@pytest.mark.parametrize("mode", [{"synchronous": True}, *slow({}, {"max_staleness": 0})])
def test_one_coordinator_after_another(cluster: PsCluster, mode: dict[str, Any]) -> None:
    """Servers do not mistake the steps of the second coordinator for those of the first."""
    strategy = cluster.strategy(**mode)
    with strategy.scope():
        weight = nn.Parameter(torch.zeros(3))
        model = nn.ParameterList([weight])
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

    def train() -> None:
        optimizer.zero_grad()
        model[0].sum().neg().backward()
        optimizer.step()

    for count in (3, 5):
        coordinator = cluster.coordinator(strategy)
        for _ in range(count):
            coordinator.schedule(train)
            coordinator.join()
        del coordinator
        gc.collect()
    assert weight.tolist() == [8.0] * 3


@pytest.mark.parametrize("is_early", [True, False])
def test_a_refused_gradient_changes_no_server(cluster: PsCluster, is_early: bool) -> None:
    strategy = cluster.strategy(refuse_nonfinite=True)
    coordinator = cluster.coordinator(strategy)
    with strategy.scope():
        model = nn.ParameterList([nn.Parameter(torch.zeros(2)) for _ in range(6)])
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

    def train(factors: list[float]) -> str:
        optimizer.zero_grad()
        sum(f * p.sum() for f, p in zip(factors, model, strict=True)).backward()
        if not is_early:
            model[0].grad.mul_(2.0)
        try:
            optimizer.step()
        except ValueError as error:
            return str(error)
        return ""

    for bad in (True, False, True):
        factors = [1.0] * 5 + [float("nan") if bad else 1.0]
        refused = coordinator.fetch(coordinator.schedule(train, (factors,)), 20)
        assert ("nothing was changed" in refused) is bad
    coordinator.join()
    torch.testing.assert_close(model[5], torch.full((2,), -1.0))
    torch.testing.assert_close(model[0], torch.full((2,), -1.0 if is_early else -2.0))
    stats = [strategy.client.stats(server) for server in range(3)]
    assert [one["rounds"] for one in stats] == [{"open": 0, "nbytes": 0}] * 3
    counts = [thing["nonfinite"] for one in stats for thing in one["objects"]]
    assert sorted(counts) == [0] * 5 + [4]


def test_synchronous_steps_that_fail(cluster: PsCluster) -> None:
    """A gradient is refused on a worker, or the step on a server: no worker waits for it."""
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
    optimizer.param_groups[0]["lr"] = 1e39  # above the servers' limit
    values = [coordinator.schedule(train, (False,)) for _ in range(2)]
    with pytest.raises((ValueError, FastdistError), match="lr must be a finite number"):
        coordinator.join()
    for value in values:
        with pytest.raises((ValueError, FastdistError), match="lr must be a finite number"):
            value.fetch(20)
    for server in range(3):
        assert strategy.client.stats(server)["rounds"] == {"open": 0, "nbytes": 0}
