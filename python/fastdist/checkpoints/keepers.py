"""Modules and optimizers whose values are kept elsewhere, such as on parameter servers."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

_keepers: weakref.WeakKeyDictionary[Any, weakref.ref[Any]] = weakref.WeakKeyDictionary()


def keep(parts: Iterable[nn.Module | torch.optim.Optimizer], keeper: Any) -> None:
    """Record the keeper of the values of modules and optimizers.

    Its methods `write_files`, `check_files` and `read_files` take a checkpoint's directory.
    """
    for part in parts:
        _keepers[part] = weakref.ref(keeper)


def keeper_of(part: Any) -> Any:
    """Return the keeper of a part's values; None if the part has them itself."""
    if not isinstance(part, nn.Module | torch.optim.Optimizer):
        return None
    known = _keepers.get(part)
    return None if known is None else known()
