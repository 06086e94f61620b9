"""DistributedDataParallel on handwritten digits: the usual script of torch.

torchrun --nproc-per-node 2 examples/torch_backend/ddp_digits.py
"""

import argparse

import fastdist  # registers the backend; torch 2.14 finds it without this line
import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--backend", default="fastdist")
parser.add_argument("--epochs", type=int, default=5)
options = parser.parse_args()

dist.init_process_group(options.backend)
torch.manual_seed(0)
images, labels = load_digits(return_X_y=True)
data = TensorDataset(torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels))
sampler = DistributedSampler(data, seed=0)
batches = DataLoader(data, batch_size=32, sampler=sampler)

model = DistributedDataParallel(
    torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
)
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
for epoch in range(options.epochs):
    sampler.set_epoch(epoch)
    total = torch.zeros(2)  # loss, and right answers
    for x, y in batches:
        optimizer.zero_grad()
        scores = model(x)
        loss = F.cross_entropy(scores, y)
        loss.backward()
        optimizer.step()
        total += torch.stack([len(x) * loss.detach(), (scores.argmax(1) == y).sum()])
    dist.all_reduce(total)
    loss, right = (total / sampler.total_size).tolist()
    if dist.get_rank() == 0:
        print(f"epoch {epoch}: loss {loss:.4f}, accuracy {right:.3f}")
dist.destroy_process_group()
