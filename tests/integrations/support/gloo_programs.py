"""Training programs of other libraries, for Gloo: gloo_programs.py NAME.

None knows of fastdist. Each prints RESULT, the class of its process group, and a hash of its
weights or of its losses.
"""

from __future__ import annotations

import hashlib
import sys
import tempfile
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

STEPS = 6


def tell(tensors: Iterable[torch.Tensor]) -> None:
    whole = hashlib.sha256()
    for tensor in tensors:
        whole.update(tensor.detach().reshape(-1).view(torch.uint8).numpy().tobytes())
    if dist.get_rank() == 0:
        print("RESULT", type(dist.group.WORLD).__name__, whole.hexdigest()[:16], flush=True)


def rows(count: int = 96, width: int = 8) -> torch.Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(1))


class Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Sequences that count up."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = (index + torch.arange(12)) % 50
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))


def train(model: nn.Module, batches: Iterable[Any]) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for batch in batches:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()


def accelerate() -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    loader = torch.utils.data.DataLoader(rows(), batch_size=8)  # type: ignore[arg-type]
    model, batches = accelerator.prepare(network(), loader)
    train(model, batches)
    tell([*model.parameters(), accelerator.gather(torch.ones(2) * accelerator.process_index)])


def _trainer_arguments(folder: str, **others: Any) -> dict[str, Any]:
    return {
        "output_dir": folder,
        "use_cpu": True,
        "max_steps": STEPS,
        "per_device_train_batch_size": 4,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        **others,
    }


def _language_model() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel, set_seed

    set_seed(0)
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=50, n_positions=16, n_embd=16, n_layer=1, n_head=2)
    )


def transformers(**others: Any) -> None:
    from transformers import Trainer, TrainingArguments

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(**_trainer_arguments(folder, **others))
        trainer = Trainer(_language_model(), arguments, train_dataset=Rows())
        trainer.train()
        tell(trainer.model.parameters())


def transformers_ddp_backend() -> None:
    transformers(ddp_backend="gloo")


def trl() -> None:
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    words = {"[UNK]": 0, "[PAD]": 1, "[EOS]": 2, **{f"w{i}": i + 3 for i in range(40)}}
    whole = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    whole.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=whole, unk_token="[UNK]", pad_token="[PAD]", eos_token="[EOS]"
    )
    texts = [" ".join(f"w{(i + k) % 40}" for k in range(3 + i % 5)) for i in range(64)]
    with tempfile.TemporaryDirectory() as folder:
        trainer = SFTTrainer(
            _language_model(),
            SFTConfig(**_trainer_arguments(folder, max_length=12, bf16=False)),
            train_dataset=Dataset.from_dict({"text": texts}),
            processing_class=tokenizer,
        )
        trainer.train()
        tell(trainer.model.parameters())


def ignite() -> None:
    import ignite.distributed as idist
    from ignite.engine import Engine

    with idist.Parallel(backend="gloo") as parallel:

        def run(_: int) -> None:
            loader = idist.auto_dataloader(rows(), batch_size=16, shuffle=False)
            model = idist.auto_model(network())
            assert isinstance(model, nn.parallel.DistributedDataParallel)
            optimizer = idist.auto_optim(torch.optim.SGD(model.parameters(), lr=0.1))

            def step(_: Engine, batch: torch.Tensor) -> None:
                optimizer.zero_grad()
                model(batch).square().mean().backward()
                optimizer.step()

            Engine(step).run(loader, max_epochs=1)
            total = idist.all_reduce(torch.ones(2) * (idist.get_rank() + 1))
            tell([*model.parameters(), total])

        parallel.run(run)


def lightning() -> None:
    import lightning as L
    from lightning.fabric.plugins.environments import mpi

    mpi._MPI4PY_AVAILABLE = False  # Lightning would load the MPI library, where there may be none

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = network()

        def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
            return self.network(batch).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

        def on_train_end(self) -> None:
            tell(self.parameters())

    trainer = L.Trainer(
        accelerator="cpu",
        devices=dist_size(),
        strategy="ddp",
        max_steps=STEPS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader = torch.utils.data.DataLoader(rows(), batch_size=8)  # type: ignore[arg-type]
    trainer.fit(Module(), loader)


def dist_size() -> int:
    import os

    return int(os.environ["WORLD_SIZE"])


def geometric() -> None:
    from torch_geometric.data import Data
    from torch_geometric.nn import GCNConv

    dist.init_process_group("gloo")
    nodes = 32
    edges = torch.stack([torch.arange(nodes), (torch.arange(nodes) * 7 + 1) % nodes])
    graph = Data(x=rows(nodes), edge_index=edges, y=torch.arange(nodes) % 3)

    class Graph(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first, self.second = GCNConv(8, 16), GCNConv(16, 3)

        def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(x, edge_index).relu(), edge_index)

    model = nn.parallel.DistributedDataParallel(Graph())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    own = torch.arange(dist.get_rank(), nodes, dist.get_world_size())
    for _ in range(STEPS):
        optimizer.zero_grad()
        F.cross_entropy(model(graph.x, graph.edge_index)[own], graph.y[own]).backward()
        optimizer.step()
    tell(model.parameters())


def timm() -> None:
    import timm.utils
    from timm import create_model

    arguments: Any = type("Arguments", (), {"device": "cpu", "dist_backend": "gloo"})()
    device = timm.utils.init_distributed_device(arguments)
    torch.manual_seed(0)
    model = create_model("test_vit", num_classes=4).to(device)
    parallel = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.05)
    torch.manual_seed(dist.get_rank())
    for _ in range(2):
        optimizer.zero_grad()
        loss = F.cross_entropy(parallel(torch.randn(2, 3, 160, 160)), torch.tensor([0, 3]))
        loss.backward()
        optimizer.step()
    tell([*model.parameters(), timm.utils.reduce_tensor(loss.detach(), dist.get_world_size())])


def sentence_transformers() -> None:
    from datasets import Dataset
    from sentence_transformers import (
        SentenceTransformer,
        SentenceTransformerTrainer,
        SentenceTransformerTrainingArguments,
        losses,
    )
    from sentence_transformers.models import BoW, Dense

    torch.manual_seed(0)
    words = [f"w{i}" for i in range(40)]
    model = SentenceTransformer(modules=[BoW(words), Dense(40, 8)], device="cpu")
    texts = [" ".join(f"w{(i + k) % 40}" for k in range(4)) for i in range(64)]
    pairs = {"first": texts, "second": texts[1:] + texts[:1], "label": [i / 64 for i in range(64)]}
    with tempfile.TemporaryDirectory() as folder:
        trainer = SentenceTransformerTrainer(
            model,
            SentenceTransformerTrainingArguments(**_trainer_arguments(folder)),
            train_dataset=Dataset.from_dict(pairs),
            loss=losses.CosineSimilarityLoss(model),
        )
        trainer.train()
        tell(model.parameters())


def optuna() -> None:
    import optuna as o
    from optuna_integration import TorchDistributedTrial

    o.logging.set_verbosity(o.logging.ERROR)
    dist.init_process_group("gloo")
    found: list[float] = []

    def objective(single: Any) -> float:
        trial = TorchDistributedTrial(single)
        rate = trial.suggest_float("rate", 1e-3, 1e-1, log=True)
        trial.suggest_categorical("kind", ["a", "b"])
        loss = torch.tensor([rate * (dist.get_rank() + 1)], dtype=torch.float64)
        dist.all_reduce(loss)
        found.append(loss.item())
        return loss.item()

    if dist.get_rank() == 0:
        study = o.create_study(sampler=o.samplers.TPESampler(seed=0))
        study.optimize(objective, n_trials=5)
    else:
        for _ in range(5):
            objective(None)
    tell([torch.tensor(found)])


def ray() -> None:
    """Starts its own workers, which inherit this process's environment."""
    import ray as r
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    r.init(address="local", num_cpus=2, include_dashboard=False)

    def work() -> None:
        from ray.train.torch import prepare_model

        model = prepare_model(network())
        own = rows().chunk(2)[dist.get_rank()]
        train(model, own.chunk(STEPS))
        tell(model.parameters())

    with tempfile.TemporaryDirectory() as folder:
        TorchTrainer(
            work,
            torch_config=TorchConfig(backend="gloo"),
            scaling_config=ScalingConfig(num_workers=2),
            run_config=RunConfig(storage_path=folder),
        ).fit()


if __name__ == "__main__":
    globals()[sys.argv[1]]()
    if dist.is_initialized():
        dist.destroy_process_group()  # else Gloo's threads may abort the process
    if dist.is_initialized():
        dist.destroy_process_group()
