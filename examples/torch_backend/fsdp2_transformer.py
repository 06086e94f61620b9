"""FSDP2 with a small transformer that learns to copy: the usual script of torch.

torchrun --nproc-per-node 2 examples/torch_backend/fsdp2_transformer.py
"""

import argparse

import fastdist  # registers the backend; torch 2.14 finds it without this line
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

parser = argparse.ArgumentParser()
parser.add_argument("--backend", default="fastdist")
parser.add_argument("--steps", type=int, default=60)
options = parser.parse_args()

VOCABULARY, LENGTH, WIDTH = 64, 16, 64


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Parameter(torch.randn(LENGTH, WIDTH) / 8)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 128, dropout=0.0, batch_first=True)
            for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.places
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


dist.init_process_group(options.backend)
torch.manual_seed(0)
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
model = Transformer()
for layer in model.layers:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

torch.manual_seed(1 + dist.get_rank())
for step in range(options.steps):
    tokens = torch.randint(VOCABULARY, (16, LENGTH))
    optimizer.zero_grad()
    loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    loss.backward()
    optimizer.step()
    if step % 20 == 19:
        mean = loss.detach()
        dist.all_reduce(mean, dist.ReduceOp.AVG)
        if dist.get_rank() == 0:
            print(f"step {step + 1}: loss {mean:.4f}")
dist.destroy_process_group()
