"""Refuses one replica's part of a batch where a module would take its statistics for all of it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from fastdist.errors import FastdistError
from fastdist.replicas.context import state

_parts = WeakTensorKeyDictionary()


def watch_parts(parts: Iterable[Any], modules: Iterable[nn.Module]) -> None:
    """Raise an error where a module computes a part outside `run` in training mode.

    Args:
        parts: the values that the program has taken out of batches.
        modules: modules whose buffers are running means.
    """
    _parts.update({part: None for part in parts if isinstance(part, torch.Tensor)})
    for module in modules:
        if _refuse not in module._forward_pre_hooks.values():
            module.register_forward_pre_hook(_refuse)


def _refuse(module: nn.Module, args: tuple[Any, ...]) -> None:
    if state.replica is not None or not module.training:
        return
    if any(isinstance(value, torch.Tensor) and value in _parts for value in args):
        raise FastdistError(
            f"{type(module).__name__}, in training mode and outside run, got this replica's part "
            "of a batch: its running statistics would be those of the part. Call "
            "strategy.run(model, args=(batch,)), or model.eval() before; torch's "
            "update_bn(loader, model) needs the plain DataLoader, whose batches are whole"
        )
