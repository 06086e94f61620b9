"""Lightning and Fabric with strategy="fastdist"."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("lightning")

# One process has 2 examples per batch, and 3 batches; the other 3 examples, and 3 batches.
TRAINER = """
import logging, warnings
import torch
{imports}
from {package}.environments import LightningEnvironment as OneMachine
warnings.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

class Net(Lightning.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(2, 1)

    def training_step(self, batch):
        mean, count = batch[0].mean(), len(batch[0])
        self.log("mean", mean, on_step=False, on_epoch=True, sync_dist=True, batch_size=count)
        self.log("count", torch.tensor(count), on_step=True, on_epoch=False, sync_dist=True)
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

    def train_dataloader(self):
        rank = self.global_rank
        x = torch.full((6 + 3 * rank, 2), float(rank))
        return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x), 2 + rank)

trainer = Lightning.Trainer(
    strategy="fastdist", accelerator="cpu", devices=2, max_epochs=1, logger=False,
    enable_progress_bar=False, enable_checkpointing=False, enable_model_summary=False,
    use_distributed_sampler=False, plugins=[OneMachine()],
)
model = Net()
trainer.fit(model)
if trainer.global_rank == 0:
    found = trainer.callback_metrics
    print(torch.distributed.get_backend(), float(found["mean"]), float(found["count"]))
"""
FABRIC = """
import fastdist.integrations.lightning, torch
from lightning.fabric import Fabric
from lightning.fabric.plugins.environments import LightningEnvironment
fabric = Fabric(
    accelerator="cpu", strategy="fastdist", devices=2, plugins=[LightningEnvironment()]
)
fabric.launch()
mean = fabric.all_reduce(torch.tensor(fabric.global_rank), reduce_op="mean")
model = fabric.setup(torch.nn.Linear(1, 1))
fabric.backward(model(torch.full((1, 1), float(fabric.global_rank))).sum())
if fabric.global_rank == 0:
    print(torch.distributed.get_backend(), float(mean), float(model.weight.grad))
"""


def output(folder: Path, code: str) -> list[str]:
    script = folder / "script.py"
    script.write_text(code)
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=120, cwd=folder
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("imports", "package"),
    [
        (
            "import fastdist.integrations.lightning, lightning as Lightning",
            "lightning.fabric.plugins",
        ),
        ("import lightning as Lightning, fastdist", "lightning.fabric.plugins"),
        ("import pytorch_lightning as Lightning, fastdist", "lightning_fabric.plugins"),
    ],
)
def test_the_trainer_weighs_means_by_examples(tmp_path: Path, imports: str, package: str) -> None:
    # 6 examples of value 0 and 9 of value 1; batches have 2.5 examples on average.
    code = TRAINER.replace("{imports}", imports).replace("{package}", package)
    backend, mean, count = output(tmp_path, code)
    assert (backend, float(count)) == ("fastdist", 2.5)
    assert float(mean) == pytest.approx(0.6, rel=1e-6)


@pytest.mark.slow
def test_fabric(tmp_path: Path) -> None:
    assert output(tmp_path, FABRIC) == ["fastdist", "0.5", "0.5"]


def test_fastdist_loads_no_lightning() -> None:
    code = "import fastdist, sys; assert 'lightning' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
