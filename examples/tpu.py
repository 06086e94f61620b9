"""Trains on the cores of a TPU, or on virtual devices of a CPU; works with any strategy.

On a TPU VM; or anywhere, with torch_xla, on four virtual devices:

    PJRT_DEVICE=TPU python examples/tpu.py
    PJRT_DEVICE=CPU CPU_NUM_DEVICES=4 python examples/tpu.py

Without torch_xla, on two processes:

    python examples/tpu.py --strategy mirrored --devices cpu:0 cpu:1
    fastdist run -n 2 examples/tpu.py --strategy mirrored

Needs torch and scikit-learn. All commands give the same loss and accuracy. Under TPUStrategy the
script also prints the number of compiled programs.
"""

from __future__ import annotations

import digits
import fastdist as fd
import torch
import torch.nn.functional as F
from torch import nn


def main() -> None:
    parser = digits.parser("Digits on a TPU.", "tpu")
    parser.add_argument("--save", help="file for the trained weights")
    options = parser.parse_args()
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
    if isinstance(strategy, fd.TPUStrategy):
        count = strategy.compilations.count
        progress.say(f"compiled {count} program for {options.epochs * len(batches)} steps")
    progress.result(digits.accuracy(strategy, model, test, options.global_batch_size))
    if options.save:
        torch.save({k: v.cpu() for k, v in model.state_dict().items()}, options.save)


if __name__ == "__main__":
    main()
