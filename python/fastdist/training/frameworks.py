"""Modules of other frameworks, which do not register inner modules and state with torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

frameworks: list[Any] = []
"""Those that are known; each appends itself, with the methods of `keras.layers.KerasLayers`."""


def inner_modules(root: nn.Module) -> list[nn.Module]:
    """Return a module and all modules inside it, each once."""
    outer = [root, *(module for framework in frameworks for module in framework.inner(root))]
    return list({id(inner): inner for module in outer for inner in module.modules()}.values())


def state_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return the tensors of this module alone that forward may write: buffers and their like."""
    named = {name: buffer for name, buffer in module._buffers.items() if buffer is not None}
    for framework in frameworks:
        named |= framework.state(module)
    return named


def moving_averages(module: nn.Module) -> list[torch.Tensor]:
    """Return the tensors of this module alone that are means over batches."""
    if isinstance(module, nn.modules.batchnorm._NormBase):
        statistics = (module.running_mean, module.running_var)
        return [buffer for buffer in statistics if buffer is not None]
    return [tensor for framework in frameworks for tensor in framework.moving_averages(module)]
