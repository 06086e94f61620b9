"""Trains a small network on scikit-learn's handwritten digits, on any number of replicas.

    python examples/mirrored.py --devices cpu:0 cpu:1       replicas are threads
    fastdist run -n 2 examples/mirrored.py                  replicas are processes
    python examples/mirrored.py --strategy one_device       the same without replicas

The line that makes the strategy is all that differs; accuracy and loss do not.
"""

from __future__ import annotations

import argparse

import fastdist as fd
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn


def make_strategy(options: argparse.Namespace) -> fd.Strategy:
    if options.strategy == "one_device":
        return fd.OneDeviceStrategy("cpu")
    return fd.MirroredStrategy(options.devices)


def main() -> None:
    parser = argparse.ArgumentParser(description="Digits on a strategy.")
    parser.add_argument("--strategy", choices=["mirrored", "one_device"], default="mirrored")
    parser.add_argument("--devices", nargs="*", help="of the replicas; all GPUs, else a CPU")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--global-batch-size", type=int, default=128)
    options = parser.parse_args()

    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
    held = torch.arange(len(x)) % 5 == 0
    train, test = (x[~held], y[~held]), (x[held], y[held])

    torch.manual_seed(0)
    strategy = make_strategy(options)
    with strategy.scope():
        model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
        optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    batches = strategy.distribute_dataset(
        train, global_batch_size=options.global_batch_size, shuffle=True, seed=0
    )
    held_out = strategy.distribute_dataset(test, global_batch_size=options.global_batch_size)

    def train_step(batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        images, labels = batch
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        return loss.detach()

    def count_right(batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        images, labels = batch
        with torch.no_grad():
            return (model(images).argmax(1) == labels).sum()

    is_chief = 0 in strategy.local_replica_ids
    for epoch in range(options.epochs):
        losses = [
            strategy.reduce("mean", strategy.run(train_step, args=(batch,))) for batch in batches
        ]
        if is_chief:
            print(f"epoch {epoch + 1}/{options.epochs}  loss {torch.stack(losses).mean():.4f}")
    right = sum(
        int(strategy.reduce("sum", strategy.run(count_right, args=(batch,)))) for batch in held_out
    )
    strategy.check_in_sync()
    if is_chief:
        replicas = strategy.num_replicas_in_sync
        print(f"accuracy on held-out digits: {right / len(test[1]):.4f} ({replicas} replicas)")


if __name__ == "__main__":
    main()
