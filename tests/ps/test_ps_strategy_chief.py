"""Changes on the chief of a parameter-server job, as workers see them."""

import copy
import warnings
from collections.abc import Iterator

import pytest
import torch
from fastdist.errors import FastdistError
from ps_cluster import PsCluster
from served_net import Net, batches, make, reference, same, sgd, step
from torch import nn


@pytest.fixture(scope="module")
def cluster() -> Iterator[PsCluster]:
    cluster = PsCluster(workers=2, servers=3)
    yield cluster
    cluster.close()


@pytest.mark.slow
def test_changes_by_hand_and_learning_rates(cluster: PsCluster) -> None:
    strategy = cluster.strategy(max_staleness=0)
    coordinator = cluster.coordinator(strategy)
    model, optimizer = make(strategy, sgd)
    other, other_optimizer = reference(sgd)
    data = batches(4)
    for i, batch in enumerate(data):
        for module, own in ((model, optimizer), (other, other_optimizer)):
            own.param_groups[0]["lr"] = 0.1 / (i + 1)
            with torch.no_grad():
                module.hidden.bias.add_(i)
        coordinator.schedule(step, (model, optimizer, *batch))
        coordinator.join()
        step(other, other_optimizer, *batch)
    same(model, other)
    model.load_state_dict(reference(sgd)[0].state_dict())
    coordinator.schedule(step, (model, optimizer, *data[0]))
    coordinator.join()
    again, again_optimizer = reference(sgd)
    again_optimizer.param_groups[0]["lr"] = 0.025
    step(again, again_optimizer, *data[0])
    same(model, again)
    optimizer.param_groups[0]["momentum"] = 0.5
    with pytest.raises(ValueError, match="only lr may change after the scope has ended"):
        coordinator.schedule(step, (model, optimizer, *data[0]))


def test_modes_and_frozen_parameters(cluster: PsCluster) -> None:
    strategy = cluster.strategy(max_staleness=0)
    coordinator = cluster.coordinator(strategy)
    with strategy.scope():
        model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Embedding(3, 2))
        model[1].requires_grad_(False)
        optimizer = sgd(model.parameters())

    def train() -> tuple[bool, bool]:
        optimizer.zero_grad()
        (model[:2](torch.eye(2)).square().sum() + model[2](torch.tensor(1)).sum()).backward()
        optimizer.step()
        return model[1].training, model[0].weight.requires_grad

    def changes() -> list[bool]:
        before = copy.deepcopy(model.state_dict())
        coordinator.schedule(train)
        coordinator.join()
        return [not torch.equal(before[key], value) for key, value in model.state_dict().items()]

    # Linear's weight and bias; BatchNorm's, and its statistics; rows.
    model.eval()
    assert changes() == [True, True, False, False, False, False, False, True]
    model.train()
    model[0].requires_grad_(False)
    assert changes() == [False, False, False, False, True, True, True, True]
    model.append(nn.Linear(2, 2))
    with pytest.raises(
        FastdistError,
        match="gained or lost submodules, parameters or buffers since its scope ended",
    ):
        coordinator.schedule(train)


@pytest.mark.slow
def test_schedulers_on_the_chief(cluster: PsCluster) -> None:
    strategy = cluster.strategy(max_staleness=0)
    coordinator = cluster.coordinator(strategy)
    torch.manual_seed(0)
    with strategy.scope():
        model = Net()
        optimizer = sgd(model.parameters())
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    other, other_optimizer = reference(sgd)

    for i, batch in enumerate(batches(3)):
        coordinator.schedule(step, (model, optimizer, *batch))
        coordinator.join()
        with warnings.catch_warnings():  # torch has seen no step in this process
            warnings.simplefilter("ignore")
            scheduler.step()
        other_optimizer.param_groups[0]["lr"] = 0.1 * 0.5**i
        step(other, other_optimizer, *batch)
    same(model, other)


def test_schedulers_that_step_on_the_chief(cluster: PsCluster) -> None:
    strategy = cluster.strategy()
    coordinator = cluster.coordinator(strategy)
    rates = torch.optim.lr_scheduler
    with strategy.scope():
        model = nn.Linear(2, 2)
        groups = [{"params": [model.weight], "name": "weight"}, {"params": [model.bias]}]
        optimizer = sgd(groups)
        inside = rates.OneCycleLR(optimizer, 1.0, total_steps=4, cycle_momentum=False)

    def train() -> list[float]:
        model(torch.ones(2)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        return [group["lr"] for group in optimizer.param_groups]

    for make_scheduler in (lambda: inside, lambda: rates.StepLR(optimizer, 1)):
        scheduler = make_scheduler()
        for _ in range(3):
            got = coordinator.schedule(train).fetch()
            assert got == pytest.approx(scheduler.get_last_lr())
            coordinator.join()
            scheduler.step()  # torch warns if it knows of no earlier step


@pytest.mark.parametrize("synchronous", [False, True])
def test_several_scopes(cluster: PsCluster, synchronous: bool) -> None:
    strategy = cluster.strategy(synchronous=synchronous)
    coordinator = cluster.coordinator(strategy)
    made = []
    for _ in range(3):
        with strategy.scope():
            weight = nn.ParameterList([nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))])
            made.append((weight, [sgd([parameter]) for parameter in weight]))

    def train() -> None:
        sum(parameter.sum() for weight, _ in made for parameter in weight).backward()
        for weight, optimizers in made:
            for optimizer in optimizers:
                optimizer.step()
            weight.zero_grad()

    for _ in range(6):
        coordinator.schedule(train)
    coordinator.join()
    steps = 3 if synchronous else 6
    for weight, _ in made:
        for parameter in weight:
            torch.testing.assert_close(parameter.detach(), torch.full((2,), -0.1 * steps))
