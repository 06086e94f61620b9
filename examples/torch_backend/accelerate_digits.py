"""Hugging Face Accelerate on handwritten digits.

fastdist run -n 2 examples/torch_backend/accelerate_digits.py
torchrun --nproc-per-node 2 examples/torch_backend/accelerate_digits.py
"""

import argparse

import fastdist  # registers the backend; torch 2.14 finds it without this line
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--backend", default="fastdist")
parser.add_argument("--epochs", type=int, default=5)
options = parser.parse_args()

# Made before, since Accelerate itself makes none but Gloo's on the CPU.
torch.distributed.init_process_group(options.backend)
accelerator = Accelerator(cpu=True)
torch.manual_seed(0)
images, labels = load_digits(return_X_y=True)
data = TensorDataset(torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels))
network = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
optimizer = torch.optim.Adam(network.parameters(), lr=3e-3)
batches = DataLoader(data, batch_size=32, shuffle=True)
model, optimizer, batches = accelerator.prepare(network, optimizer, batches)
for epoch in range(options.epochs):
    losses = []
    for x, y in batches:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        losses.append(accelerator.gather(loss.detach().reshape(1)))
    accelerator.print(f"epoch {epoch}: loss {torch.cat(losses).mean():.4f}")
accelerator.end_training()
