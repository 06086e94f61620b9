"""Refuses one replica's part of a batch where a module would take its statistics for all of it."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

from fastdist.errors import FastdistError
from fastdist.replicas.context import state

_parts = WeakTensorKeyDictionary()
_norms: weakref.WeakSet[nn.Module] = weakref.WeakSet()
# Of all modules, while parts exist: a hook of the model's own would hinder its export.
_hook: RemovableHandle | None = None


def watch_parts(parts: Iterable[Any], modules: Iterable[nn.Module]) -> None:
    """Raise an error where a model computes a part outside `run` in training mode.

    Args:
        parts: the values that the program has taken out of batches.
        modules: modules of the strategy, of which BatchNorms are watched.
    """
    global _hook
    _norms.update(module for module in modules if isinstance(module, _NormBase))
    if _norms:
        _parts.update({part: None for part in parts if isinstance(part, torch.Tensor)})
        _hook = _hook or register_module_forward_pre_hook(_refuse)


def _refuse(module: nn.Module, args: tuple[Any, ...]) -> None:
    global _hook
    if not len(_parts) and _hook is not None:
        _hook.remove()
        _hook = None
    if state.replica is not None or not module.training or torch.compiler.is_compiling():
        return
    if not any(isinstance(value, torch.Tensor) and value in _parts for value in args):
        return
    is_recomputed = torch._C._current_graph_task_id() != -1  # by a checkpoint, in another thread
    if not is_recomputed and any(m.training and m in _norms for m in module.modules()):
        raise FastdistError(
            f"{type(module).__name__}, in training mode and outside run, got this replica's part "
            "of a batch: its running statistics would be those of the part. Call "
            "strategy.run(model, args=(batch,)), or model.eval() before; torch's "
            "update_bn(loader, model) needs the plain DataLoader, whose batches are whole"
        )
