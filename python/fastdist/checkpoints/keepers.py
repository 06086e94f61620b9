"""Modules and optimizers whose values are kept elsewhere, such as on parameter servers."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn


class Keeper(Protocol):
    """Keeps the values of modules and optimizers, and writes its own files into checkpoints."""

    def write_files(self, directory: Path) -> Any:
        """Write files into the directory of a checkpoint; return what its index says of them."""

    def check_files(self, directory: Path) -> None:
        """Check every byte of the files in a checkpoint."""

    def read_files(self, directory: Path) -> None:
        """Restore the values from a checkpoint that `check_files` has accepted."""


_keepers: weakref.WeakKeyDictionary[Any, weakref.ref[Keeper]] = weakref.WeakKeyDictionary()


def keep(parts: Iterable[nn.Module | torch.optim.Optimizer], keeper: Keeper) -> None:
    """Record the keeper of the values of modules and optimizers."""
    for part in parts:
        _keepers[part] = weakref.ref(keeper)


def keeper_of(part: Any) -> Keeper | None:
    """Return the keeper of a part's values; None if the part has them itself."""
    if not isinstance(part, nn.Module | torch.optim.Optimizer):
        return None
    known = _keepers.get(part)
    return None if known is None else known()
