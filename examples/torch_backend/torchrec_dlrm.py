"""TorchRec's DistributedModelParallel: embedding tables cut over the ranks, on the CPU.

torchrun --nproc-per-node 2 examples/torch_backend/torchrec_dlrm.py
"""

import argparse

import fastdist  # registers the backend; torch 2.14 finds it without this line
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel

parser = argparse.ArgumentParser()
parser.add_argument("--backend", default="fastdist")
parser.add_argument("--steps", type=int, default=100)
options = parser.parse_args()

FEATURES, ROWS, WIDTH, BATCH = ["user", "item", "shop"], 500, 16, 64


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tables = EmbeddingBagCollection(
            tables=[
                EmbeddingBagConfig(
                    name=f"{name}_table",
                    embedding_dim=WIDTH,
                    num_embeddings=ROWS,
                    feature_names=[name],
                )
                for name in FEATURES
            ]
        )
        self.over = torch.nn.Sequential(
            torch.nn.Linear(WIDTH * len(FEATURES), 32), torch.nn.ReLU(), torch.nn.Linear(32, 1)
        )

    def forward(self, ids: KeyedJaggedTensor) -> torch.Tensor:
        return self.over(self.tables(ids).values()).squeeze(1)


dist.init_process_group(options.backend)
torch.manual_seed(0)
model = DistributedModelParallel(Model(), device=torch.device("cpu"))
optimizer = torch.optim.Adam(model.parameters(), lr=2e-2)

torch.manual_seed(1 + dist.get_rank())
for step in range(options.steps):
    lengths = torch.randint(1, 4, (len(FEATURES) * BATCH,))
    values = torch.randint(ROWS, (int(lengths.sum()),))
    ids = KeyedJaggedTensor.from_lengths_sync(FEATURES, values, lengths)
    users = ids["user"].values().split(ids["user"].lengths().tolist())
    wanted = torch.stack([(bag.float().mean() > ROWS / 2).float() for bag in users])
    optimizer.zero_grad()
    loss = F.binary_cross_entropy_with_logits(model(ids), wanted)
    loss.backward()
    optimizer.step()
    if step % 20 == 19:
        mean = loss.detach()
        dist.all_reduce(mean, dist.ReduceOp.AVG)
        if dist.get_rank() == 0:
            print(f"step {step + 1}: loss {mean:.4f}")
dist.destroy_process_group()
