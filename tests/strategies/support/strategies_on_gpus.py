"""One replica of a job on GPUs, which test_strategies_gpu.py starts: training as on a CPU.

Replicas share GPU 0 where there are fewer GPUs than processes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import fastdist as fd
import torch
from digits_training import adam, batch, digits, plain, require_close, sgd, train
from fastdist import Strategy
from torch import nn
from torch.nn import functional as F


def on_cpu(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.cpu() for tensor in tensors]


def trains_as_one_device(strategy: Strategy) -> None:
    """1,797 digits in batches of 100: the last one is uneven."""
    require_close(on_cpu(train(strategy, sgd)), plain(sgd), 1e-4)
    require_close(on_cpu(train(strategy, adam)), plain(adam), 1e-3)


def trains_graphed(strategy: Strategy) -> None:
    torch.manual_seed(1)
    with strategy.scope():
        model, optimizer = sgd()

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    graphed = strategy.make_graphed(step)
    images, labels = digits()
    for i in range(0, len(images), 100):
        args = batch(strategy, images[i : i + 100], labels[i : i + 100])
        loss = strategy.reduce("mean", strategy.run(graphed, args=args))
        assert torch.isfinite(loss)
        if i == 1000:  # other calls between replays
            strategy.gather(strategy.run(lambda: torch.ones(3, device="cuda")))
    strategy.check_in_sync()
    require_close(on_cpu([p.detach() for p in model.parameters()]), plain(sgd), 1e-4)


def unused_parameters_keep_no_gradient(strategy: Strategy) -> None:
    with strategy.scope():
        model = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])
        strategy.mirror(model)

    def step() -> list[bool]:
        number = 0 if fd.get_replica_context().replica_id_in_sync_group == 0 else 1
        model[number](torch.ones(2, 4, device="cuda")).sum().backward()
        return [layer.weight.grad is not None for layer in model]

    found = [strategy.local_results(value)[0] for value in strategy.run(step)]
    assert found == [True, strategy.num_replicas_in_sync > 1, False], found


def replicas_draw_apart(strategy: Strategy) -> None:
    def draw() -> torch.Tensor:
        return torch.stack([torch.rand(4), torch.rand(4, device="cuda").cpu()]).unsqueeze(0)

    torch.manual_seed(5)
    rows = strategy.gather(strategy.run(draw))
    assert len({tuple(row.flatten().tolist()) for row in rows}) == strategy.num_replicas_in_sync
    torch.manual_seed(5)
    assert torch.equal(strategy.gather(strategy.run(draw)), rows)


def averages_batch_norm(strategy: Strategy) -> None:
    with strategy.scope():
        model = nn.Sequential(nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 10))
        strategy.mirror(model)
    images, labels = digits()

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss.detach()

    for i in range(0, 400, 100):
        strategy.run(step, args=batch(strategy, images[i : i + 100], labels[i : i + 100]))
    strategy.check_in_sync()
    assert model[1].running_mean.is_cuda
    assert model[1].running_mean.abs().sum() > 0


def recomputes_in_its_replica(strategy: Strategy) -> None:
    from torch.utils.checkpoint import checkpoint

    with strategy.scope():
        model = nn.Linear(64, 10)
        strategy.mirror(model)
    seen = []

    def forward(x: torch.Tensor) -> torch.Tensor:
        seen.append(fd.get_replica_context().replica_id_in_sync_group)
        return model(x)

    def step(x: torch.Tensor) -> None:
        checkpoint(forward, x, use_reentrant=False).sum().backward()

    (x,) = batch(strategy, digits()[0][:100])
    strategy.run(step, (x,))
    assert len(seen) == 2


def brings_batches_to_the_gpu(strategy: Strategy) -> None:
    rows = []
    data = strategy.distribute_dataset(digits(), global_batch_size=100, shuffle=True, seed=3)
    for one in data:
        rows += [leaf for part in one for leaf in strategy.local_results(part)]
    assert all(leaf.is_cuda for leaf in rows)


PARTS: dict[str, Callable[[Strategy], None]] = {
    part.__name__: part
    for part in (
        trains_as_one_device,
        trains_graphed,
        unused_parameters_keep_no_gradient,
        replicas_draw_apart,
        averages_batch_norm,
        recomputes_in_its_replica,
        brings_batches_to_the_gpu,
    )
}

if __name__ == "__main__":
    strategy = fd.MirroredStrategy()
    for part in sys.argv[1:]:
        PARTS[part](strategy)
    print("passed")
