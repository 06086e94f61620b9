"""Training on parameter servers, beside the same steps on one device."""

import copy
import os
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fastdist as fd
import numpy as np
import pytest
import torch
from fastdist.cluster import ClusterSpec, SimpleClusterResolver
from fastdist.errors import ClusterConfigError, FastdistError, UnavailableError
from fastdist.ps.partition import FixedShards
from ps_cluster import PsCluster, wait_for
from torch import nn

F = nn.functional


@pytest.fixture(scope="module")
def cluster() -> Iterator[PsCluster]:
    cluster = PsCluster(workers=2, servers=3)
    yield cluster
    cluster.close()


class Net(nn.Module):
    """Rows, a tied weight, and dense layers."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(40, 6)
        self.bags = nn.EmbeddingBag(30, 6, mode="sum")
        self.hidden = nn.Linear(12, 8)
        self.again = nn.Linear(8, 8)
        self.again.weight = nn.Parameter(torch.eye(8))
        self.out = nn.Linear(8, 8)
        self.out.weight = self.again.weight

    def forward(self, words: torch.Tensor, bags: torch.Tensor) -> torch.Tensor:
        joined = torch.cat([self.words(words).sum(1), self.bags(bags)], 1)
        return self.out(torch.tanh(self.again(torch.tanh(self.hidden(joined)))))


def batches(count: int, seed: int = 0) -> list[tuple[torch.Tensor, ...]]:
    generator = torch.Generator().manual_seed(seed)

    def numbers(limit: int, *shape: int) -> torch.Tensor:
        return torch.randint(0, limit, shape, generator=generator)

    return [(numbers(40, 12, 3), numbers(30, 12, 4), numbers(8, 12)) for _ in range(count)]


def step(model: Any, optimizer: Any, words: Any, bags: Any, labels: Any) -> float:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(words, bags), labels)
    loss.backward()
    optimizer.step()
    return float(loss.detach())


def make(strategy: Any, make_optimizer: Callable[[Any], Any]) -> tuple[Any, Any]:
    torch.manual_seed(0)
    with strategy.scope():
        model = Net()
        optimizer = make_optimizer(model.parameters())
    return model, optimizer


def reference(make_optimizer: Callable[[Any], Any]) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = Net()
    return model, make_optimizer(model.parameters())


def same(one: nn.Module, other: nn.Module, tolerance: float = 2e-6) -> None:
    values = one.state_dict()
    for name, value in other.state_dict().items():
        torch.testing.assert_close(values[name], value, atol=tolerance, rtol=tolerance, msg=name)


def adagrad(parameters: Any) -> Any:
    return torch.optim.Adagrad(parameters, lr=0.1)


def sgd(parameters: Any) -> Any:
    return torch.optim.SGD(parameters, lr=0.1)


@pytest.mark.parametrize("partitioner", [None, FixedShards(2)], ids=["whole", "cut"])
@pytest.mark.parametrize("make_optimizer", [sgd, adagrad])
def test_one_step_after_another_is_one_device(
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


def test_variables_go_round(cluster: PsCluster) -> None:
    strategy = cluster.strategy()
    with strategy.scope():
        model = nn.ParameterList([nn.Parameter(torch.zeros(2)) for _ in range(4)])
    ((_, served),) = strategy._bundles
    assert [sharded.pieces[0].server for sharded in served.sharded] == [0, 1, 2, 0]
    assert len(list(model)) == 4


def test_synchronous_is_the_global_batch(cluster: PsCluster) -> None:
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


def test_synchronous_weights_are_examples(cluster: PsCluster) -> None:
    strategy = cluster.strategy(synchronous=True)
    coordinator = cluster.coordinator(strategy)
    model, optimizer = make(strategy, sgd)
    other, other_optimizer = reference(sgd)
    batch = batches(1)[0]

    def part(begin: int, end: int, *tensors: Any) -> None:
        arrays = tuple(tensor[begin:end].numpy() for tensor in tensors)
        (data,) = strategy.distribute_dataset(arrays, global_batch_size=12)
        strategy.run(lambda own: step(model, optimizer, *own), (data,))

    coordinator.schedule(part, (0, 9, *batch))
    coordinator.schedule(part, (9, 12, *batch))
    coordinator.join()
    step(other, other_optimizer, *batch)
    same(model, other)


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


def test_workers_with_two_replicas() -> None:
    cluster = PsCluster(workers=1, servers=2, devices=["cpu:0", "cpu:1"])
    try:
        strategy = cluster.strategy()
        coordinator = cluster.coordinator(strategy)
        torch.manual_seed(0)
        with strategy.scope():
            model = Net()
            hashed = fd.nn.Embedding(None, 8, initializer=("constant", 0.5, 0.0))
            optimizer = adagrad([*model.parameters(), *hashed.parameters()])
        other, _ = reference(adagrad)
        rows = nn.Embedding(40, 8)
        nn.init.constant_(rows.weight, 0.5)
        other_optimizer = adagrad([*other.parameters(), *rows.parameters()])

        def forward(model: Any, rows: Any, words: Any, bags: Any) -> Any:
            return model(words, bags) + rows(words).sum(1)

        def replica_step(model: Any, rows: Any, optimizer: Any, *batch: Any) -> float:
            words, bags, labels = batch
            optimizer.zero_grad()
            loss = F.cross_entropy(forward(model, rows, words, bags), labels)
            loss.backward()
            optimizer.step()
            return float(loss.detach())

        def train(words: Any, bags: Any, labels: Any) -> None:
            arrays = tuple(tensor.numpy() for tensor in (words, bags, labels))
            (data,) = strategy.distribute_dataset(arrays, global_batch_size=12)
            strategy.run(lambda own: replica_step(model, hashed, optimizer, *own), (data,))

        for batch in batches(6):
            coordinator.schedule(train, batch)
            replica_step(other, rows, other_optimizer, *batch)
        coordinator.join()
        same(model, other)
        ids = torch.arange(40)
        torch.testing.assert_close(hashed(ids).detach(), rows.weight.detach(), atol=2e-6, rtol=0)
    finally:
        cluster.close()


def test_asynchronous_learns(cluster: PsCluster) -> None:
    strategy = cluster.strategy()
    coordinator = cluster.coordinator(strategy)
    model, optimizer = make(strategy, adagrad)
    data = batches(4)
    values = [coordinator.schedule(step, (model, optimizer, *data[i % 4])) for i in range(120)]
    coordinator.join()
    losses = coordinator.fetch(values)
    assert np.mean(losses[-8:]) < 0.3 * np.mean(losses[:8])


@pytest.mark.parametrize(
    "way", ["clipped", "clamped", "scaled", "accumulated", "closure", "two steps"]
)
def test_what_happens_before_a_step(cluster: PsCluster, way: str) -> None:
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


def test_gradients_that_no_step_takes_are_not_applied(cluster: PsCluster) -> None:
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
    with pytest.raises(ValueError, match="take a new lr at any time"):
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
    with pytest.raises(FastdistError, match="got or lost parts since its scope ended"):
        coordinator.schedule(train)


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
        with warnings.catch_warnings():  # torch has seen no step here
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
            scheduler.step()  # warns where it knows of no step before


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


def test_batch_norm(cluster: PsCluster) -> None:
    strategy = cluster.strategy(max_staleness=0)
    coordinator = cluster.coordinator(strategy)
    with strategy.scope():
        model = nn.BatchNorm1d(3)
        optimizer = sgd(model.parameters())
    other = nn.BatchNorm1d(3)

    def train(x: torch.Tensor) -> None:
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    for i in range(6):
        x = torch.randn(8, 3, generator=torch.Generator().manual_seed(i))
        coordinator.schedule(train, (x,))
        other(x)
    coordinator.join()
    torch.testing.assert_close(model.running_mean, other.running_mean)
    torch.testing.assert_close(model.running_var, other.running_var)
    assert model.num_batches_tracked == 6


def test_hashed_embeddings(cluster: PsCluster) -> None:
    strategy = cluster.strategy(max_staleness=0)
    coordinator = cluster.coordinator(strategy)
    with strategy.scope():
        table = fd.nn.Embedding(None, 4, initializer=("normal", 0.0, 1.0), seed=3)
        bag = fd.nn.EmbeddingBag(None, 4, mode="mean", initializer=("constant", 1.0, 0.0))
        optimizer = sgd([*table.parameters(), *bag.parameters()])
    ids = torch.tensor([2**62 + 5, -7, 2**62 + 5, 11])
    before = table(ids).detach()
    assert torch.equal(before[0], before[2])

    def train(ids: torch.Tensor) -> None:
        (table(ids).sum() + bag(ids.reshape(2, 2)).sum()).backward()
        optimizer.step()
        optimizer.zero_grad()

    coordinator.schedule(train, (ids,))
    coordinator.join()
    expected = before - 0.1
    expected[[0, 2]] -= 0.1  # twice in the batch
    torch.testing.assert_close(table(ids).detach(), expected)
    rows = bag(ids.reshape(-1, 1)).detach()
    torch.testing.assert_close(rows[1], torch.full((4,), 1 - 0.05))
    torch.testing.assert_close(rows[0], torch.full((4,), 1 - 0.1))
    assert "weight" not in table.state_dict()
    kept = [s["rows"] for i in range(3) for s in strategy.client.stats(i)["objects"] if "rows" in s]
    assert sum(kept) == 6


def test_states_of_tables_are_on_servers_alone(cluster: PsCluster) -> None:
    strategy = cluster.strategy()
    coordinator = cluster.coordinator(strategy)
    with strategy.scope():
        model = nn.ModuleList([fd.nn.Embedding(None, 64), nn.Embedding(20_000, 64)])
        optimizer = adagrad(model.parameters())  # which makes its state at once
    assert not optimizer.state
    ids = torch.tensor([7])

    def train() -> int:
        sum(table(ids).sum() for table in model).backward()
        optimizer.step()
        return len(optimizer.state)

    before = [table(ids).detach() for table in model]
    assert coordinator.schedule(train).fetch() == 0
    coordinator.join()
    for table, row in zip(model, before, strict=True):
        torch.testing.assert_close(table(ids).detach(), row - 0.1)
    sizes = [len(definition.blob) for _, definition in strategy.definitions._named.values()]
    assert max(sizes) < 100_000


def test_cached_rows(cluster: PsCluster) -> None:
    strategy = cluster.strategy()
    coordinator = cluster.coordinator(strategy)
    with strategy.scope():
        table = fd.nn.Embedding(
            None, 4, initializer=("constant", 0.0, 0.0), cached_rows=64, cache_age=3
        )
        optimizer = sgd(table.parameters())

    def requests() -> int:
        return int(sum(strategy.client.stats(i)["requests"] for i in range(3)))

    def look(times: int) -> list[float]:
        return [float(table(torch.tensor([5, 6])).detach()[0, 0]) for _ in range(times)]

    def train() -> list[float]:
        before = look(1)
        table(torch.tensor([5])).sum().backward()
        optimizer.step()
        return before + look(1)

    before, after = coordinator.schedule(train).fetch()
    np.testing.assert_allclose(after, before - 0.1, rtol=1e-5)  # its own push, at once
    look(1)  # the chief has a cache of its own
    begun = requests()
    seen = look(9)
    assert requests() - begun - 3 <= 3 * 4  # of nine lookups of two rows, every fourth asks
    np.testing.assert_allclose(seen[-1], -0.1, rtol=1e-5)


def test_narrow_wires(cluster: PsCluster) -> None:
    for wire in ("bfloat16", "float16", "int8"):
        strategy = cluster.strategy(wire=wire, max_staleness=0)
        coordinator = cluster.coordinator(strategy)
        model, optimizer = make(strategy, sgd)
        other, other_optimizer = reference(sgd)
        for batch in batches(4):
            coordinator.schedule(step, (model, optimizer, *batch))
            step(other, other_optimizer, *batch)
        coordinator.join()
        same(model, other, 0.05)
    with pytest.raises(ValueError, match="wire must be one of float32"):
        cluster.strategy(wire="int4")


def test_gradients_that_are_not_finite(cluster: PsCluster) -> None:
    strategy = cluster.strategy(refuse_nonfinite=True)
    coordinator = cluster.coordinator(strategy)
    with strategy.scope():
        model = nn.Linear(2, 2)
        optimizer = sgd(model.parameters())
    before = model.weight.detach().clone()

    def train(x: Any) -> None:
        model(x).sum().backward()
        optimizer.step()

    coordinator.schedule(train, (torch.tensor([[float("nan"), 1.0]]),))
    with pytest.raises(ValueError, match="'0/weight': 2 of 4 elements of the gradient are NaN"):
        coordinator.join()
    coordinator.join()
    assert torch.equal(model.weight, before)


@pytest.mark.parametrize(("limit", "padding"), [(None, 2**62), (None, -1), (9, 4), (9, -1)])
def test_padding(cluster: PsCluster, limit: int | None, padding: int) -> None:
    strategy = cluster.strategy()
    coordinator = cluster.coordinator(strategy)
    with strategy.scope():
        table = fd.nn.Embedding(limit, 3, padding_idx=padding)
        optimizer = sgd(table.parameters())
    ids = torch.tensor([padding if limit is None else padding % limit, 3])
    before = table(ids).detach()
    assert torch.equal(before[0], torch.zeros(3))

    def train() -> None:
        table(ids).sum().backward()
        optimizer.step()

    coordinator.schedule(train)
    coordinator.join()
    expected = before - torch.tensor([[0.0], [0.1]])
    torch.testing.assert_close(table(ids).detach(), expected)
    if limit is not None:
        plain = fd.nn.Embedding(limit, 3, padding_idx=padding)
        torch.testing.assert_close(plain(ids).detach(), before)
        with pytest.raises(ValueError, match="within 9 embeddings, got 9"):
            fd.nn.Embedding(limit, 3, padding_idx=limit)


def test_embeddings_without_servers() -> None:
    plain = fd.nn.Embedding(5, 3, seed=1)
    assert torch.equal(plain(torch.tensor([1, 1, 4])), plain.weight[[1, 1, 4]])
    bag = fd.nn.EmbeddingBag(5, 3, mode="max", seed=1)
    assert torch.equal(bag(torch.tensor([[1, 2]]))[0], plain.weight[[1, 2]].amax(0))
    with pytest.raises(fd.errors.UnsupportedError, match="needs parameter servers"):
        fd.nn.Embedding(None, 3)


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


def test_workers_draw_other_numbers(cluster: PsCluster) -> None:
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


# --- what is refused -----------------------------------------------------------------------------


def test_the_chief_does_not_train(cluster: PsCluster) -> None:
    strategy = cluster.strategy()
    model, optimizer = make(strategy, sgd)
    with pytest.raises(FastdistError, match="the chief has no replicas"):
        strategy.run(os.getpid)
    with pytest.raises(FastdistError, match="outside a scheduled function"):
        step(model, optimizer, *batches(1)[0])


def test_optimizers_of_other_scopes(cluster: PsCluster) -> None:
    strategy = cluster.strategy()
    coordinator = cluster.coordinator(strategy)
    with strategy.scope():
        model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="not made in the same scope"), strategy.scope():
        sgd(model.parameters())
    outside = sgd(model.parameters())

    def train(optimizer: Any) -> None:
        model(torch.ones(2)).sum().backward()
        optimizer = optimizer or sgd(model.parameters())
        optimizer.step()

    for optimizer in (outside, None):
        coordinator.schedule(train, (optimizer,))
        with pytest.raises(FastdistError, match=r"SGD was not made in the scope.*\(2, 2\)"):
            coordinator.join()
    own = nn.Linear(2, 2)  # what workers have for themselves they may train
    own_optimizer = sgd(own.parameters())

    def train_own() -> None:
        own(torch.ones(2)).sum().backward()
        own_optimizer.step()

    coordinator.schedule(train_own)
    coordinator.join()


@pytest.mark.parametrize(
    ("make_optimizer", "message"),
    [
        (torch.optim.Rprop, "cannot apply Rprop; expected one of SGD"),
        (lambda p: torch.optim.Adam(p, amsgrad=True), "amsgrad=False, got True"),
    ],
)
def test_optimizers_that_servers_lack(
    cluster: PsCluster, make_optimizer: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        make(cluster.strategy(), make_optimizer)


def test_models_that_servers_cannot_keep(cluster: PsCluster) -> None:
    strategy = cluster.strategy()
    with pytest.raises(ValueError, match="is lazy"), strategy.scope():
        nn.LazyLinear(3)
    with pytest.raises(ValueError, match=r"is of torch\.float64"), strategy.scope():
        nn.Linear(2, 2).double()
    with pytest.raises(ValueError, match="max_norm"), strategy.scope():
        nn.Embedding(3, 3, max_norm=1.0)


def test_ids_out_of_range(cluster: PsCluster) -> None:
    strategy = cluster.strategy()
    coordinator = cluster.coordinator(strategy)
    with strategy.scope():
        model = nn.Embedding(5, 2)
    coordinator.schedule(lambda: model(torch.tensor([1, 5])))
    with pytest.raises(IndexError, match="row 5 of a table that has 5 rows"):
        coordinator.join()


@pytest.mark.parametrize("missing", ["chief", "worker", "ps"])
def test_clusters_without(missing: str) -> None:
    jobs = {"chief": ["a:1"], "worker": ["b:1"], "ps": ["c:1"]}
    del jobs[missing]
    resolver = SimpleClusterResolver(ClusterSpec(jobs), *list(ClusterSpec(jobs).chief))
    with pytest.raises(ClusterConfigError, match=f"no {missing}"):
        fd.ParameterServerStrategy(resolver)


def test_no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FASTDIST_PS_KEYS", raising=False)
    spec = ClusterSpec({"chief": ["a:1"], "worker": ["b:1"], "ps": ["c:1"]})
    with pytest.raises(ClusterConfigError, match="no keys: start the job by"):
        fd.ParameterServerStrategy(SimpleClusterResolver(spec, "chief", 0))
    with pytest.raises(ClusterConfigError, match="evaluator takes no part"):
        fd.ParameterServerStrategy(SimpleClusterResolver(spec, "evaluator", 0))
