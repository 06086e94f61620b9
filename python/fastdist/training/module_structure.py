"""Describes the structure of modules, to detect changes that users make to them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from fastdist.training.modules import is_materialized


def structure_of(roots: Sequence[nn.Module]) -> list[object]:
    """Return the ids and types of modules and of their tensors, with dtypes and shapes.

    The result changes when a module or tensor is replaced, added or removed.
    """
    found: list[object] = []
    for module in modules_of(roots):
        found += (id(module), type(module))
        for tensor in tensors_in(module):
            shape = tensor.shape if is_materialized(tensor) else None
            found += (id(tensor), type(tensor), tensor.dtype, shape)
    return found


def modules_of(roots: Sequence[nn.Module]) -> Iterator[nn.Module]:
    """Yield every module once, in order of registration."""
    seen: set[nn.Module] = set()
    for root in roots:
        yield from (module for _, module in root.named_modules(seen))


def tensors_in(module: nn.Module) -> list[torch.Tensor]:
    """Return the parameters and buffers of a module, without its children's."""
    named = (module.__dict__["_parameters"], module.__dict__["_buffers"])
    return [tensor for tensors in named for tensor in tensors.values() if tensor is not None]
