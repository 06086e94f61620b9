"""A task of a job with parameter servers: the chief reads a value until a server stops or dies."""

import sys
from pathlib import Path

import fastdist as fd
import torch
from fastdist.recorder import place

FOLDER = Path(sys.argv[1])
place._folders = lambda: [FOLDER]
strategy = fd.ParameterServerStrategy()
with strategy.scope():
    model = torch.nn.Linear(2, 1)


def read() -> None:
    while True:
        strategy.client.stats(0)


if strategy.is_chief:
    read()
