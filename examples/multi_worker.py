"""Trains on several workers, and saves the weights.

On one machine, two workers:

    fastdist run -n 2 examples/multi_worker.py
    torchrun --nproc-per-node 2 examples/multi_worker.py

On several machines, run the same command on each machine, with its own task in TF_CONFIG:

    export TF_CONFIG='{"cluster": {"worker": ["host0:2222", "host1:2222"]},
                       "task": {"type": "worker", "index": 0}}'
    python examples/multi_worker.py --save digits.pt

A worker with `--devices cpu:0 cpu:1` starts a second replica. torchrun on several machines, mpiexec
and srun start the workers too. Needs torch and scikit-learn.
"""

from __future__ import annotations

from pathlib import Path

import digits
import fastdist as fd
import torch
import torch.nn.functional as F
from torch import nn


class Net(nn.Module):
    """A network that normalizes over the global batch and counts the examples of all replicas."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 128)
        self.norm = fd.nn.SyncBatchNorm(128)
        self.second = nn.Linear(128, 10)
        self.seen = fd.Variable(
            0,
            synchronization=fd.VariableSynchronization.ON_READ,
            aggregation=fd.VariableAggregation.SUM,
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen.assign_add(len(images))
        hidden: torch.Tensor = self.second(F.relu(self.norm(self.first(images))))
        return hidden


def main() -> None:
    parser = digits.parser("Digits on several workers.", "multi_worker")
    parser.add_argument("--save", type=Path, help="where the chief writes the state_dict")
    options = parser.parse_args()
    train, test = digits.load()

    torch.manual_seed(0)
    strategy = digits.make_strategy(options)
    with strategy.scope():
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.epochs)
    batches = strategy.distribute_dataset(
        train, global_batch_size=options.global_batch_size, shuffle=True, seed=0
    )

    def train_step(batch: digits.Split) -> torch.Tensor:
        images, labels = batch
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        return loss.detach()

    progress = digits.Progress(strategy, options.epochs)
    progress.say(f"{strategy!r}")
    for epoch in range(options.epochs):
        model.train()
        losses = [
            strategy.reduce("mean", strategy.run(train_step, args=(batch,))) for batch in batches
        ]
        schedule.step()
        progress.epoch(epoch + 1, float(torch.stack(losses).mean()), len(train[1]))
    model.eval()
    strategy.check_in_sync()
    progress.result(digits.accuracy(strategy, model, test, options.global_batch_size))
    weights = model.state_dict()  # on every replica: `seen` is a sum over all of them
    progress.say(f"examples seen in training: {int(weights['seen.value'])}")
    if options.save is not None and progress.is_chief:
        torch.save(weights, options.save)


if __name__ == "__main__":
    main()
