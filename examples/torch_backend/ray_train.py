"""Ray Train with DDP on handwritten digits, on the machine's own cores.

python examples/torch_backend/ray_train.py
"""

import argparse
import tempfile

import ray
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer


def train(options: dict[str, int]) -> None:
    """Train on every worker."""
    import ray.train.torch
    import torch
    import torch.nn.functional as F
    from sklearn.datasets import load_digits
    from torch.utils.data import DataLoader, TensorDataset

    torch.manual_seed(0)
    images, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels))
    batches = ray.train.torch.prepare_data_loader(DataLoader(data, batch_size=32, shuffle=True))
    model = ray.train.torch.prepare_model(
        torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for epoch in range(options["epochs"]):
        losses = []
        for x, y in batches:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        mean = torch.stack(losses).mean()
        torch.distributed.all_reduce(mean, torch.distributed.ReduceOp.AVG)
        ray.train.report({"epoch": epoch, "loss": mean.item()})
    if ray.train.get_context().get_world_rank() == 0:
        print(f"loss {mean:.4f}")


def import_fastdist() -> None:
    """Register the backend in a worker; torch 2.14 finds it without this function."""
    import fastdist


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", default="fastdist")
    parser.add_argument("--epochs", type=int, default=5)
    options = parser.parse_args()
    ray.init(
        address="local", num_cpus=2, runtime_env={"worker_process_setup_hook": import_fastdist}
    )
    with tempfile.TemporaryDirectory() as directory:
        trainer = TorchTrainer(
            train,
            train_loop_config={"epochs": options.epochs},
            torch_config=TorchConfig(backend=options.backend),
            scaling_config=ScalingConfig(num_workers=2),
            run_config=RunConfig(storage_path=directory),
        )
        trainer.fit()


if __name__ == "__main__":
    main()
