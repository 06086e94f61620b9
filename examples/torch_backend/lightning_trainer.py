"""Lightning's Trainer with DDP on handwritten digits.

python examples/torch_backend/lightning_trainer.py
"""

import argparse

import fastdist  # registers the backend; torch 2.14 finds it without this line
import lightning
import torch
import torch.nn.functional as F
from lightning.pytorch.strategies import DDPStrategy
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset


class Digits(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.network = torch.nn.Sequential(
            torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10)
        )

    def training_step(self, batch, number):
        x, y = batch
        loss = F.cross_entropy(self.network(x), y)
        self.log("loss", loss, on_epoch=True, on_step=False, sync_dist=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=3e-3)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", default="fastdist")
    parser.add_argument("--epochs", type=int, default=5)
    options = parser.parse_args()
    lightning.seed_everything(0)
    images, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels))
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=DDPStrategy(process_group_backend=options.backend),
        max_epochs=options.epochs,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(Digits(), DataLoader(data, batch_size=32, shuffle=True))
    if trainer.is_global_zero:
        print(f"loss {trainer.callback_metrics['loss']:.4f}")


if __name__ == "__main__":
    main()
