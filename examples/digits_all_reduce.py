"""Trains a small network on scikit-learn's digits; gradients go through one fused all_reduce.

    pip install torch scikit-learn
    fastdist run -n 2 examples/digits_all_reduce.py     # any number of ranks; or plain python

Every rank takes its share of each global batch and adds up the loss over it; the sum of the
gradients over all ranks, divided by the size of the global batch, is the gradient that one process
would have computed. So the result is the same for any number of ranks, but for rounding.
"""

from __future__ import annotations

import argparse

import fastdist as fd
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.nn import functional as F


def make_network() -> nn.Module:
    """Two hidden layers; the same initial weights on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10)
    )


def load() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Digits as float32 in [0, 1] and their labels, for training and held out."""
    images, labels = load_digits(return_X_y=True)
    split = train_test_split(images / 16.0, labels, test_size=0.25, random_state=0, stratify=labels)
    train_x, test_x, train_y, test_y = split
    return (
        torch.tensor(train_x, dtype=torch.float32),
        torch.tensor(train_y),
        torch.tensor(test_x, dtype=torch.float32),
        torch.tensor(test_y),
    )


def train(comm: fd.Communicator, epochs: int, batch_size: int) -> tuple[nn.Module, float]:
    """Train on this rank's shares.

    Returns:
        The network, and its accuracy on the held-out digits.
    """
    train_x, train_y, test_x, test_y = load()
    network = make_network()
    parameters = list(network.parameters())
    optimizer = torch.optim.Adam(parameters, lr=2e-3)
    for epoch in range(epochs):
        order = torch.randperm(len(train_x), generator=torch.Generator().manual_seed(epoch))
        total_loss = torch.zeros(())
        for batch in order.split(batch_size):
            share = batch.tensor_split(comm.world_size)[comm.rank]
            optimizer.zero_grad()
            loss = F.cross_entropy(network(train_x[share]), train_y[share], reduction="sum")
            (loss / len(batch)).backward()
            comm.all_reduce([parameter.grad for parameter in parameters])
            optimizer.step()
            total_loss += loss.detach()
        comm.all_reduce(total_loss)
        if comm.rank == 0:
            print(f"epoch {epoch + 1:2d}  loss {total_loss / len(train_x):.4f}", flush=True)
    with torch.no_grad():
        accuracy = (network(test_x).argmax(1) == test_y).float().mean().item()
    return network, accuracy


def main() -> None:
    """Parse the arguments, train, print the accuracy."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--batch-size", type=int, default=64, help="of all ranks together")
    parser.add_argument("--save", help="file for the trained weights, written by rank 0")
    options = parser.parse_args()

    with fd.init() as comm:
        network, accuracy = train(comm, options.epochs, options.batch_size)
        if comm.rank == 0:
            print(f"accuracy on held-out digits: {accuracy:.1%} ({comm.world_size} ranks)")
            if options.save:
                torch.save(network.state_dict(), options.save)
        comm.barrier()


if __name__ == "__main__":
    main()
