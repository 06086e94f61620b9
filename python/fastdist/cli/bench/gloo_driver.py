"""Drives Gloo, through torch.distributed."""

from __future__ import annotations

from pathlib import Path

from fastdist.cli.bench.driver import Driver
from fastdist.cli.bench.torch_host import TorchHostDriver


def open_driver(folder: Path) -> Driver:
    """Join the other ranks. Every rank must call."""
    return TorchHostDriver("gloo", folder / "gloo.store")
