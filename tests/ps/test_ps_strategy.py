"""Training on parameter servers, compared with the same steps on one device."""

import copy
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fastdist as fd
import numpy as np
import pytest
import torch
from fastdist.ps.client.partition import FixedShards
from fastdist.ps.client.sharded import begin_assign
from ps_cluster import PsCluster
from served_net import F, adagrad, batches, make, reference, same, sgd, step
from torch import nn


@pytest.fixture(scope="module")
def cluster() -> Iterator[PsCluster]:
    cluster = PsCluster(workers=2, servers=3)
    yield cluster
    cluster.close()


@pytest.mark.parametrize("partitioner", [None, FixedShards(2)], ids=["whole", "cut"])
@pytest.mark.parametrize("make_optimizer", [sgd, adagrad])
def test_sequential_steps_equal_one_device(
    cluster: PsCluster, make_optimizer: Any, partitioner: Any
) -> None:
    strategy = cluster.strategy(partitioner, max_staleness=0)
    coordinator = cluster.coordinator(strategy)
    model, optimizer = make(strategy, make_optimizer)
    other, other_optimizer = reference(make_optimizer)
    same(model, other, 0)
    values = [coordinator.schedule(step, (model, optimizer, *batch)) for batch in batches(12)]
    expected = [step(other, other_optimizer, *batch) for batch in batches(12)]
    coordinator.join()
    np.testing.assert_allclose(coordinator.fetch(values), expected, rtol=1e-5)
    same(model, other)
    words, bags, _ = batches(1, 5)[0]
    torch.testing.assert_close(model(words, bags), other(words, bags), atol=1e-5, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("is_clipped", [False, True])
def test_large_variables_beside_small_ones(cluster: PsCluster, is_clipped: bool) -> None:
    """Large variables travel alone, one of them in parts."""
    strategy = cluster.strategy(max_staleness=0)
    coordinator = cluster.coordinator(strategy)

    def made() -> tuple[nn.Module, Any]:
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(300, 2000), nn.Tanh(), nn.Linear(2000, 10), nn.Linear(10, 1)
        )
        return model, sgd(model.parameters())

    with strategy.scope():
        model, optimizer = made()
    other, other_optimizer = made()

    def train(model: Any, optimizer: Any, x: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        if is_clipped:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()

    for _ in range(3):
        x = torch.randn(16, 300)
        coordinator.schedule(train, (model, optimizer, x))
        train(other, other_optimizer, x)
    coordinator.join()
    same(model, other)


@pytest.fixture
def one_worker() -> Iterator[PsCluster]:
    """One worker, whose next functions wait while it runs one."""
    cluster = PsCluster(workers=1, servers=2)
    yield cluster
    cluster.close()


@pytest.mark.slow
def test_two_optimizers_in_turns(one_worker: PsCluster) -> None:
    """A step brings the values of its own optimizer; the next function has those of both."""
    strategy = one_worker.strategy()
    coordinator = one_worker.coordinator(strategy)

    def made() -> tuple[nn.Module, list[Any]]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1, bias=False))
        return model, [sgd(model[:2].parameters()), adagrad(model[2].parameters())]

    def train(model: Any, optimizers: list[Any], which: list[int], x: torch.Tensor) -> list[float]:
        losses = []
        for number in which:
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizers[number].step()
            losses.append(loss.item())
        return losses

    with strategy.scope():
        model, optimizers = made()
    other, other_optimizers = made()
    values, expected = [], []
    for number, which in enumerate(([0, 1], [1, 0, 1], [0], [1], [1, 1], [0, 1], [0, 0])):
        x = torch.randn(16, 4, generator=torch.Generator().manual_seed(number))
        values.append(coordinator.schedule(train, (model, optimizers, which, x)))
        expected.append(train(other, other_optimizers, which, x))
    coordinator.join()
    for value, losses in zip(coordinator.fetch(values), expected, strict=True):
        np.testing.assert_allclose(value, losses, rtol=1e-5)
    same(model, other)


def test_values_that_the_last_step_has_not_brought(one_worker: PsCluster, tmp_path: Path) -> None:
    """The next function waits while one optimizer steps; it sees how others were changed."""
    strategy = one_worker.strategy()
    coordinator = one_worker.coordinator(strategy)
    with strategy.scope():
        models = [nn.Linear(2, 1, bias=False) for _ in range(2)]
        optimizers = [sgd(model.parameters()) for model in models]
    began, go_on = tmp_path / "began", tmp_path / "go_on"

    def await_file(path: Path) -> None:
        while not path.exists():
            time.sleep(0.05)

    def step_of_one() -> None:
        began.touch()
        await_file(go_on)
        models[0](torch.ones(1, 2)).sum().backward()
        optimizers[0].step()

    coordinator.schedule(step_of_one)
    await_file(began)
    items = strategy._models[0].sharded[1].assignment(np.full((1, 2), 7.0))
    strategy.client.wait_all(begin_assign(strategy.client, items))  # as another worker would
    seen = coordinator.schedule(lambda: models[1].weight.tolist())
    go_on.touch()
    assert coordinator.fetch(seen) == [[7, 7]]


def test_variables_are_placed_round_robin(cluster: PsCluster) -> None:
    strategy = cluster.strategy()
    with strategy.scope():
        model = nn.ParameterList([nn.Parameter(torch.zeros(2)) for _ in range(4)])
    (served,) = strategy._models
    assert [sharded.pieces[0].server for sharded in served.sharded] == [0, 1, 2, 0]
    assert len(list(model)) == 4


def test_synchronous_equals_the_global_batch(cluster: PsCluster) -> None:
    strategy = cluster.strategy(synchronous=True)
    coordinator = cluster.coordinator(strategy)
    model, optimizer = make(strategy, adagrad)
    other, other_optimizer = reference(adagrad)

    def part(begin: int, words: Any, bags: Any, labels: Any) -> float:
        mine = slice(begin, begin + 6)
        return step(model, optimizer, words[mine], bags[mine], labels[mine])

    for batch in batches(8):
        for begin in (0, 6):
            coordinator.schedule(part, (begin, *batch))
        step(other, other_optimizer, *batch)
    coordinator.join()
    same(model, other)


@pytest.mark.slow
@pytest.mark.parametrize("weighs", [False, True])
def test_synchronous_weights(cluster: PsCluster, weighs: bool) -> None:
    """They are the examples of a batch, or what `run` is told."""
    strategy = cluster.strategy(synchronous=True)
    coordinator = cluster.coordinator(strategy)
    model, optimizer = make(strategy, sgd)
    other, other_optimizer = reference(sgd)
    batch = batches(1)[0]

    def part(begin: int, end: int, *tensors: Any) -> None:
        arrays = tuple(tensor[begin:end].numpy() for tensor in tensors)
        (data,) = strategy.distribute_dataset(arrays, global_batch_size=12)
        if weighs:
            strategy.run(
                lambda: step(model, optimizer, *map(torch.tensor, arrays)), weight=len(arrays[0])
            )
        else:
            strategy.run(lambda own: step(model, optimizer, *own), (data,))

    coordinator.schedule(part, (0, 9, *batch))
    coordinator.schedule(part, (9, 12, *batch))
    coordinator.join()
    step(other, other_optimizer, *batch)
    same(model, other)


@pytest.mark.slow
def test_asynchronous_learns(cluster: PsCluster) -> None:
    strategy = cluster.strategy()
    coordinator = cluster.coordinator(strategy)
    model, optimizer = make(strategy, adagrad)
    data = batches(4)
    values = [coordinator.schedule(step, (model, optimizer, *data[i % 4])) for i in range(120)]
    coordinator.join()
    losses = coordinator.fetch(values)
    assert np.mean(losses[-8:]) < 0.3 * np.mean(losses[:8])


@pytest.mark.slow
@pytest.mark.parametrize(
    "way", ["clipped", "clamped", "scaled", "accumulated", "closure", "two steps"]
)
def test_changes_of_gradients_before_a_step(cluster: PsCluster, way: str) -> None:
    strategy = cluster.strategy(max_staleness=0)
    coordinator = cluster.coordinator(strategy)
    model, optimizer = make(strategy, sgd)
    other, other_optimizer = reference(sgd)

    def train(model: Any, optimizer: Any, words: Any, bags: Any, labels: Any) -> None:
        def loss() -> Any:
            optimizer.zero_grad()
            value = F.cross_entropy(model(words, bags), labels)
            (8 * value if way == "scaled" else value).backward()
            return value

        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        if way == "closure":
            optimizer.step(loss)
            return
        loss()
        if way == "clipped":
            nn.utils.clip_grad_norm_([model.hidden.weight, model.again.weight], 0.01)
        if way == "clamped":
            model.hidden.weight.grad.data.clamp_(-1e-3, 1e-3)
        if way == "scaled":
            scaler.scale(torch.ones(()))
            scaler.step(optimizer)
            return
        if way == "accumulated":
            F.cross_entropy(model(words, bags), labels).backward()
        optimizer.step()
        if way == "two steps":
            loss()
            optimizer.step()

    for batch in batches(3):
        coordinator.schedule(train, (model, optimizer, *batch))
        train(other, other_optimizer, *batch)
    coordinator.join()
    same(model, other)


def test_gradients_without_a_step_are_not_applied(cluster: PsCluster) -> None:
    strategy = cluster.strategy()
    coordinator = cluster.coordinator(strategy)
    model, _ = make(strategy, sgd)
    before = copy.deepcopy(model.state_dict())

    def only_backward(words: Any, bags: Any, labels: Any) -> None:
        F.cross_entropy(model(words, bags), labels).backward()

    coordinator.schedule(only_backward, batches(1)[0])
    coordinator.join()
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    assert all(stats["rounds"]["nbytes"] == 0 for stats in map(strategy.client.stats, range(3)))


def test_workers_have_different_random_numbers(cluster: PsCluster) -> None:
    coordinator = cluster.coordinator(cluster.strategy(), seed=4)

    def draw() -> tuple[int, float]:
        time.sleep(0.01)
        return fd.get_worker_index(), float(torch.rand(()))

    drawn = coordinator.fetch([coordinator.schedule(draw) for _ in range(12)])
    assert len({value for _, value in drawn}) == 12
    firsts = {index: next(v for i, v in drawn if i == index) for index in (0, 1)}
    again = cluster.coordinator(cluster.strategy(), seed=4)
    drawn = again.fetch([again.schedule(draw) for _ in range(12)])
    assert firsts == {index: next(v for i, v in drawn if i == index) for index in (0, 1)}
