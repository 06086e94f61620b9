"""Trains on handwritten digits in processes that Ray places on its cluster.

    python examples/cluster/ray_digits.py --ranks 2

RAY_ADDRESS names the cluster; without it, Ray starts one on this machine. Needs ray, torch and
scikit-learn.
"""

from __future__ import annotations

import argparse

import ray
from fastdist.integrations import ray as on_ray


def train(epochs: int) -> tuple[float, float]:
    """Train on every rank; return the last epoch's loss and the accuracy, the same on all ranks."""
    import fastdist as fd
    import torch
    import torch.nn.functional as F
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)
    strategy = fd.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = torch.nn.Sequential(
            torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10)
        )
        optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def step(batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        return loss.detach()

    def count_right(batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        with torch.no_grad():
            return (model(batch[0]).argmax(1) == batch[1]).sum()

    batches = strategy.distribute_dataset((x, y), global_batch_size=64, shuffle=True)
    for _ in range(epochs):
        losses = [strategy.reduce("mean", strategy.run(step, args=(batch,))) for batch in batches]
    right = [strategy.reduce("sum", strategy.run(count_right, args=(batch,))) for batch in batches]
    return float(sum(losses)) / len(losses), float(sum(right)) / len(x)


def main() -> None:
    """Start the ranks, and print what they return."""
    parser = argparse.ArgumentParser(description="Digits on a Ray cluster.")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--gpus", type=float, default=0, help="of each rank")
    parser.add_argument("--epochs", type=int, default=5)
    options = parser.parse_args()
    ray.init()
    results = on_ray.run(train, ranks=options.ranks, gpus=options.gpus, args=(options.epochs,))
    loss, accuracy = results[0]
    print(f"{options.ranks} ranks  loss {loss:.3f}  accuracy {accuracy:.3f}")


if __name__ == "__main__":
    main()
