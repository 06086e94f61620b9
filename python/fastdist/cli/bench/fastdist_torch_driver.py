"""Drives fastdist as the backend of torch.distributed."""

from __future__ import annotations

from pathlib import Path

import fastdist  # registers the backend
from fastdist.cli.bench.driver import Driver
from fastdist.cli.bench.torch_host import TorchHostDriver


def open_driver(folder: Path) -> Driver:
    """Join the other ranks. Every rank must call."""
    driver = TorchHostDriver("fastdist", folder / "fastdist.store")
    driver.version = f"fastdist {fastdist.__version__} through torch.distributed"
    return driver
