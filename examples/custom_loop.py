"""A custom training loop: accumulated and clipped gradients, warm-up, collectives in a step.

One process, one replica:

    python examples/custom_loop.py --strategy one_device

Two replicas, each a process; the strategy starts the second one, or a launcher starts both:

    python examples/custom_loop.py --devices cpu:0 cpu:1
    fastdist run -n 2 examples/custom_loop.py
    torchrun --nproc-per-node 2 examples/custom_loop.py

Needs torch and scikit-learn. Every strategy takes the same steps, and the numbers agree.
"""

from __future__ import annotations

import contextlib

import digits
import fastdist as fd
import torch
import torch.nn.functional as F
from torch import nn


def main() -> None:
    parser = digits.parser("Digits, step by step.", "mirrored")
    parser.add_argument("--accumulate", type=int, default=2, help="parts of each batch")
    parser.add_argument("--clip", type=float, default=0.5, help="the gradient's greatest norm")
    options = parser.parse_args()
    train, test = digits.load()

    torch.manual_seed(0)
    strategy = digits.make_strategy(options)
    with strategy.scope():
        model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
        optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
        warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=20)
        clipped = fd.Variable(0, aggregation=fd.VariableAggregation.ONLY_FIRST_REPLICA)
    batches = strategy.distribute_dataset(
        train, global_batch_size=options.global_batch_size, shuffle=True, seed=0
    )
    held_out = strategy.distribute_dataset(test, global_batch_size=options.global_batch_size)

    def train_step(batch: digits.Split) -> torch.Tensor:
        labels = batch[1]
        optimizer.zero_grad()
        losses = []
        parts = list(zip(*(t.chunk(options.accumulate) for t in batch), strict=True))
        for i, (x, y) in enumerate(parts, start=1):
            loss = F.cross_entropy(model(x), y, reduction="sum") / max(1, len(labels))
            with strategy.no_sync() if i < len(parts) else contextlib.nullcontext():
                loss.backward()  # only the last part communicates
            losses.append(loss.detach())
        norm = nn.utils.clip_grad_norm_(model.parameters(), options.clip)
        clipped.assign_add(int(norm > options.clip))
        optimizer.step()
        warm_up.step()
        return torch.stack(losses).sum()

    def right_of(batch: digits.Split) -> torch.Tensor:
        images, labels = batch
        with torch.no_grad():
            right = (model(images).argmax(1) == labels).sum()
        replica = fd.get_replica_context()
        assert replica is not None
        total: torch.Tensor = replica.all_reduce("sum", right)
        return total

    progress = digits.Progress(strategy, options.epochs)
    for epoch in range(options.epochs):
        losses = [
            strategy.reduce("mean", strategy.run(train_step, args=(batch,))) for batch in batches
        ]
        progress.epoch(epoch + 1, float(torch.stack(losses).mean()), len(train[1]))
    totals = [strategy.local_results(strategy.run(right_of, args=(b,)))[0] for b in held_out]
    strategy.check_in_sync()
    progress.result(float(sum(totals)) / len(test[1]))
    progress.say(f"clipped {int(clipped.value)} of {options.epochs * len(batches)} steps")


if __name__ == "__main__":
    main()
