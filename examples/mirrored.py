"""Trains a small network on handwritten digits, on any number of replicas.

One process, one replica:

    python examples/mirrored.py
    python examples/mirrored.py --strategy one_device

Two replicas, each a process; the strategy starts the second one, or a launcher starts both:

    python examples/mirrored.py --devices cpu:0 cpu:1
    fastdist run -n 2 examples/mirrored.py
    torchrun --nproc-per-node 2 examples/mirrored.py

Needs torch and scikit-learn. All commands give the same loss and accuracy.
"""

from __future__ import annotations

import digits
import torch
import torch.nn.functional as F
from torch import nn


def main() -> None:
    options = digits.parser("Digits on a strategy.", "mirrored").parse_args()
    train, test = digits.load()

    torch.manual_seed(0)
    strategy = digits.make_strategy(options)
    with strategy.scope():
        model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
        optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
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
    for epoch in range(options.epochs):
        losses = [
            strategy.reduce("mean", strategy.run(train_step, args=(batch,))) for batch in batches
        ]
        progress.epoch(epoch + 1, float(torch.stack(losses).mean()), len(train[1]))
    strategy.check_in_sync()
    progress.result(digits.accuracy(strategy, model, test, options.global_batch_size))


if __name__ == "__main__":
    main()
