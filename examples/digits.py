"""Shared by the examples: scikit-learn's handwritten digits, a strategy by its name, progress."""

from __future__ import annotations

import argparse
import sys
import time

import fastdist as fd
import torch
from sklearn.datasets import load_digits
from torch import nn

Split = tuple[torch.Tensor, torch.Tensor]


def load() -> tuple[Split, Split]:
    """Load images (n, 64) from 0 to 1 and labels (n,), a fifth of them held out."""
    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
    held = torch.arange(len(x)) % 5 == 0
    return (x[~held], y[~held]), (x[held], y[held])


def parser(description: str, strategy: str) -> argparse.ArgumentParser:
    """Make a parser with the arguments common to all examples.

    Args:
        description: the text of --help.
        strategy: the default of --strategy.
    """
    made = argparse.ArgumentParser(description=description)
    made.add_argument("--strategy", choices=sorted(STRATEGIES), default=strategy)
    made.add_argument("--devices", nargs="*", help="of the replicas; default: GPUs, or else a CPU")
    made.add_argument("--epochs", type=int, default=20)
    made.add_argument("--global-batch-size", type=int, default=128)
    return made


STRATEGIES = {
    "default": lambda devices: fd.DefaultStrategy(),
    "one_device": lambda devices: fd.OneDeviceStrategy(devices[0] if devices else "cpu"),
    "mirrored": lambda devices: fd.MirroredStrategy(devices),
    "multi_worker": lambda devices: fd.MultiWorkerMirroredStrategy(devices=devices),
    "central_storage": lambda devices: fd.CentralStorageStrategy(devices),
    "tpu": lambda devices: fd.TPUStrategy(),
}


def make_strategy(options: argparse.Namespace) -> fd.Strategy:
    """Make the strategy that --strategy names."""
    return STRATEGIES[options.strategy](options.devices)


def accuracy(strategy: fd.Strategy, model: nn.Module, split: Split, global_batch: int) -> float:
    """Compute the share of digits that the model recognises, over all replicas."""

    def count_right(batch: Split) -> torch.Tensor:
        images, labels = batch
        with torch.no_grad():
            return (model(images).argmax(1) == labels).sum()

    batches = strategy.distribute_dataset(split, global_batch_size=global_batch)
    right = [strategy.reduce("sum", strategy.run(count_right, args=(b,))) for b in batches]
    return float(sum(right)) / len(split[1])


class Progress:
    """Prints progress on the chief: on a terminal one line that changes, else a line per epoch.

    Args:
        strategy: its first replica is the chief.
        epochs: the number of epochs to come.
    """

    def __init__(self, strategy: fd.Strategy, epochs: int) -> None:
        self.is_chief = strategy.is_chief
        self._replicas = strategy.num_replicas_in_sync
        self._epochs = epochs
        self._began = time.perf_counter()

    def epoch(self, number: int, loss: float, examples: int) -> None:
        """Print an epoch's number, from 1, its mean loss, and its examples per second."""
        now = time.perf_counter()
        rate = examples / (now - self._began)
        self._began = now
        done = number == self._epochs
        end = "\r" if sys.stdout.isatty() and not done else "\n"
        self.say(
            f"epoch {number}/{self._epochs}  loss {loss:.4f}  {rate:,.0f} examples/s  ", end=end
        )

    def result(self, accuracy: float) -> None:
        """Print the share of held-out digits that are recognised."""
        self.say(f"accuracy on held-out digits: {accuracy:.4f} ({self._replicas} replicas)")

    def say(self, text: str, end: str = "\n") -> None:
        """Print on the chief alone."""
        if self.is_chief:
            print(text, end=end, flush=True)
