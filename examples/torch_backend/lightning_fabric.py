"""Lightning Fabric with DDP on handwritten digits.

python examples/torch_backend/lightning_fabric.py
"""

import argparse

import fastdist  # registers the backend; torch 2.14 finds it without this line
import lightning
import torch
import torch.nn.functional as F
from lightning.fabric.strategies import DDPStrategy
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", default="fastdist")
    parser.add_argument("--epochs", type=int, default=5)
    options = parser.parse_args()
    strategy = DDPStrategy(process_group_backend=options.backend)
    fabric = lightning.Fabric(accelerator="cpu", devices=2, strategy=strategy)
    fabric.launch()
    fabric.seed_everything(0)
    images, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels))
    network = torch.nn.Sequential(
        torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10)
    )
    model, optimizer = fabric.setup(network, torch.optim.Adam(network.parameters(), lr=3e-3))
    batches = fabric.setup_dataloaders(DataLoader(data, batch_size=32, shuffle=True))
    for epoch in range(options.epochs):
        losses = []
        for x, y in batches:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            fabric.backward(loss)
            optimizer.step()
            losses.append(loss.detach())
        mean = fabric.all_reduce(torch.stack(losses).mean())
        fabric.print(f"epoch {epoch}: loss {mean:.4f}")


if __name__ == "__main__":
    main()
