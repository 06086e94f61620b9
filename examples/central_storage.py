"""Trains a network whose replicas share one copy of the parameters and the optimizer's state.

Three replicas, each a process that the strategy starts:

    python examples/central_storage.py --devices cpu:0 cpu:1 cpu:2

The same with a copy for each replica, for comparison:

    python examples/central_storage.py --strategy mirrored --devices cpu:0 cpu:1 cpu:2

Needs torch and scikit-learn. Both commands give the same loss and accuracy; under central storage,
parameters and the optimizer's state are in memory only once.
"""

from __future__ import annotations

import digits
import fastdist as fd
import torch
import torch.nn.functional as F
from torch import nn


def states(strategy: fd.Strategy, optimizer: torch.optim.Optimizer) -> int:
    """Count the replicas that keep the optimizer's state."""
    return int(strategy.reduce("sum", strategy.run(lambda: int(bool(optimizer.state)))))


def main() -> None:
    options = digits.parser("Digits on one copy of a network.", "central_storage").parse_args()
    train, test = digits.load()

    torch.manual_seed(0)
    strategy = digits.make_strategy(options)
    with strategy.scope():
        model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 10))
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    batches = strategy.distribute_dataset(
        train, global_batch_size=options.global_batch_size, shuffle=True, seed=0
    )

    def train_step(batch: digits.Split) -> torch.Tensor:
        images, labels = batch
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()  # waits for all replicas, then steps once
        return loss.detach()

    progress = digits.Progress(strategy, options.epochs)
    for epoch in range(options.epochs):
        losses = [
            strategy.reduce("mean", strategy.run(train_step, args=(batch,))) for batch in batches
        ]
        progress.epoch(epoch + 1, float(torch.stack(losses).mean()), len(train[1]))
    progress.result(digits.accuracy(strategy, model, test, options.global_batch_size))
    replicas = strategy.num_replicas_in_sync
    kept = states(strategy, optimizer)
    progress.say(f"the optimizer's state is kept by {kept} of {replicas} replicas")


if __name__ == "__main__":
    main()
