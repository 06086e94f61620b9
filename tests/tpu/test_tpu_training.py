"""TPUStrategy: batches, gradients, optimizers and random numbers agree with one device."""

from __future__ import annotations

from typing import Any

import fastdist as fd
import pytest
import torch
import torch.nn.functional as F
from digits_training import adam, digits, plain, require_close, sgd, train
from fastdist import TPUStrategy
from fastdist.errors import UnsupportedError
from torch import nn
from virtual_devices import N, mirrored, normed, on_devices, traced_id, train_on_dataset, values_of

pytestmark = on_devices


def test_batches_are_cut_among_replicas(strategy: TPUStrategy) -> None:
    def examples(x: torch.Tensor) -> Any:
        context = fd.get_replica_context()
        assert context is not None
        return x.sum(), context.examples

    seen, rows = [], []
    for one in strategy.distribute_dataset(torch.arange(15.0), global_batch_size=4):
        total, sizes = strategy.run(examples, (one,))
        seen.append(sizes)
        rows.append(strategy.gather(strategy.run(lambda x: x * 1, (one,))).tolist())
        assert float(strategy.reduce("sum", total)) == sum(rows[-1])
    assert [sum(sizes) for sizes in seen] == [4, 4, 4, 3]
    assert seen[-1] == tuple(len(part) for part in torch.arange(3).tensor_split(N))
    assert [x for row in rows for x in row] == list(range(15))
    halves = strategy.distribute_dataset(torch.arange(100), global_batch_size=10)
    assert len(halves) == 10
    position = halves.state_dict()
    iterator = iter(halves)
    next(iterator)
    assert halves.state_dict()["step"] == position["step"] + 1  # prefetched batches do not count


def test_datasets_from_function(strategy: TPUStrategy) -> None:
    def make(context: Any) -> Any:
        return torch.arange(5 * 12).split(context.get_per_replica_batch_size(12))

    rows = [strategy.gather(one) for one in strategy.distribute_datasets_from_function(make)]
    assert [row.tolist() for row in rows] == torch.arange(60).view(5, 12).tolist()


def test_summed_gradients_of_two_replicas() -> None:
    """Batches are [1, 1] and [2, 2], and so on for more replicas."""
    strategy = TPUStrategy(gradient_reduction="sum")
    with strategy.scope():
        model = nn.Linear(2, 1, bias=False)
        model.weight.data.zero_()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        (model.weight * (traced_id() + 1.0)).sum().backward()
        optimizer.step()

    strategy.run(step)
    expected = {1: -0.1, 2: -0.3}.get(N, -0.1 * N * (N + 1) / 2)
    assert model.weight[0].tolist() == pytest.approx([expected] * 2)


def test_seven_examples(strategy: TPUStrategy) -> None:
    (one,) = strategy.distribute_dataset(torch.arange(7.0), global_batch_size=7)
    sizes = {1: (7,), 2: (4, 3), 4: (2, 2, 2, 1)}[N]
    values = strategy.local_results(one)
    assert one.examples == sizes
    if N > 1:
        assert tuple(map(len, values)) == sizes
    assert torch.cat([value.cpu().flatten() for value in values]).tolist() == [*range(7)]


def test_summed_gradients() -> None:
    strategy = TPUStrategy(gradient_reduction="sum")
    with strategy.scope():
        model = nn.Linear(1, 1, bias=False)
        model.weight.data.zero_()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        for _ in range(2):  # accumulated over two backwards
            (model.weight * (traced_id() + 1.0)).sum().backward()
        optimizer.step()

    strategy.run(step)
    assert model.weight.item() == pytest.approx(-0.1 * 2 * N * (N + 1) / 2)


@pytest.mark.parametrize("make", [sgd, adam])
@pytest.mark.parametrize("size", [100, 898])
def test_digits_train_as_on_one_device(make: Any, size: int) -> None:
    """With batches of 898, the last batch has one example: some replicas have none."""
    strategy = TPUStrategy()
    got, losses = train_on_dataset(strategy, make, 3, global_batch_size=size)
    wanted, same = train_on_dataset(fd.OneDeviceStrategy("cpu"), make, 3, global_batch_size=size)
    require_close(got, wanted, 4e-5)
    assert losses == pytest.approx(same, abs=1e-4)
    assert (strategy.compilations.count, strategy.compilations.repeated) == (1, 0)


def test_batches_made_by_hand(strategy: TPUStrategy) -> None:
    require_close([p.cpu() for p in train(strategy, sgd, epochs=3)], plain(sgd, epochs=3), 4e-5)


def batch_norm_of_replicas(strategy: fd.Strategy, size: int) -> Any:
    return train_on_dataset(strategy, normed, 1, global_batch_size=size)


@pytest.mark.parametrize("size", [100, 600])
def test_batch_norm_is_that_of_each_replica(size: int) -> None:
    """Each replica normalizes its examples; running statistics are the mean over replicas."""
    got, _ = train_on_dataset(TPUStrategy(), normed, 1, global_batch_size=size)
    wanted, _ = mirrored(batch_norm_of_replicas, size)
    require_close(got, wanted, 4e-5)


def test_accumulation_over_runs(strategy: TPUStrategy) -> None:
    def gradients(strategy: fd.Strategy) -> list[torch.Tensor]:
        torch.manual_seed(2)
        with strategy.scope():
            model = nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 1))
        x = torch.randn(20, 3)

        def backward(batch: torch.Tensor) -> None:
            model(batch).square().mean().backward()

        batches = list(strategy.distribute_dataset(x, global_batch_size=8))
        with strategy.no_sync():
            strategy.run(backward, (batches[0],))
            strategy.run(backward, (batches[1],))
        strategy.run(backward, (batches[2],))
        strategy.run(backward, (batches[2],))
        return [p.grad.cpu() for p in model.parameters() if p.grad is not None]

    require_close(gradients(strategy), gradients(fd.OneDeviceStrategy("cpu")), 1e-6)


def test_gradients_used_outside_run(strategy: TPUStrategy) -> None:
    def trained(strategy: fd.Strategy) -> list[torch.Tensor]:
        torch.manual_seed(4)
        with strategy.scope():
            model = nn.Linear(64, 10)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        batches = strategy.distribute_dataset(digits(), global_batch_size=500)

        def backward(batch: Any) -> None:
            F.cross_entropy(model(batch[0]), batch[1]).backward()

        for one in batches:
            optimizer.zero_grad()
            strategy.run(backward, (one,))
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
        strategy.check_in_sync()
        return [p.detach().cpu() for p in model.parameters()]

    require_close(trained(strategy), trained(fd.OneDeviceStrategy("cpu")), 1e-5)


def test_each_replica_has_its_own_random_stream(strategy: TPUStrategy) -> None:
    def draw() -> torch.Tensor:
        layer = nn.MultiheadAttention(4, 2, dropout=0.5, batch_first=True).to("xla")
        attended = layer(*[torch.ones(1, 2, 4, device="xla")] * 3)[0].detach().flatten()
        drawn = [
            torch.rand(2),
            F.dropout(torch.ones(4)),
            torch.randn(3, device="xla"),
            torch.randint(0, 1000, (3,)).float(),
            torch.empty(3, device="xla").normal_(),
            torch.bernoulli(torch.full((20,), 0.5)),
            torch.randperm(9).float(),
            torch.rand_like(torch.ones(2, device="xla")),
            attended * 0,
        ]
        return torch.cat([values.to("xla") for values in drawn])

    runs = []
    for _ in range(2):
        torch.manual_seed(5)
        rows = values_of(strategy, draw)
        assert len({tuple(row) for row in rows}) == N
        assert all(sorted(row[35:44]) == list(range(9)) for row in rows)
        assert all(set(row[2:6]) <= {0.0, 2.0} for row in rows)
        runs.append([*rows, torch.rand(1).tolist()])
    assert runs[0] == runs[1]
    if N > 1:
        with pytest.raises(UnsupportedError, match="poisson"):
            strategy.run(lambda: torch.poisson(torch.ones(2, device="xla")))


@pytest.mark.parametrize("make", [sgd, adam])
def test_several_steps_in_one_program(make: Any) -> None:
    strategy = TPUStrategy(steps_per_execution=6)
    got, losses = train_on_dataset(strategy, make, 1, global_batch_size=100)
    wanted, same = train_on_dataset(fd.OneDeviceStrategy("cpu"), make, 1, global_batch_size=100)
    require_close(got, wanted, 4e-5)
    assert losses == pytest.approx(same, abs=1e-4)
    assert strategy.compilations.count == 1
