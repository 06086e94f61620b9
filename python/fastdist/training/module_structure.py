"""Of what modules consist, to tell whether users have changed them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from fastdist.training.gradients import GradientHook
from fastdist.training.modules import is_materialized


def structure_of(roots: Sequence[nn.Module]) -> list[object]:
    """The ids and kinds of modules and of their tensors; changes with what users replace or add."""
    found: list[object] = []
    for module in modules_of(roots):
        found += (id(module), type(module))
        for tensor in tensors_in(module):
            shape = tensor.shape if is_materialized(tensor) else None
            found += (id(tensor), type(tensor), tensor.dtype, shape)
    return found


_TENSOR_HOOKS = {
    "_backward_hooks": torch.Tensor.register_hook,
    "_post_accumulate_grad_hooks": torch.Tensor.register_post_accumulate_grad_hook,
}


def _user_hooks(tensor: torch.Tensor, name: str) -> dict[int, Any]:
    hooks = (getattr(tensor, name) or {}) if is_materialized(tensor) else {}
    return {key: hook for key, hook in hooks.items() if not isinstance(hook, GradientHook)}


def copy_hooks(own: torch.Tensor, twin: torch.Tensor) -> None:
    """Give a twin the hooks that users have put at the tensor it is a twin of."""
    for name, register in _TENSOR_HOOKS.items():
        for hook in _user_hooks(own, name).values():
            register(twin, hook)  # type: ignore[no-untyped-call]


def modules_of(roots: Sequence[nn.Module]) -> Iterator[nn.Module]:
    """Every module once, in the order of their registration."""
    seen: set[nn.Module] = set()
    for root in roots:
        yield from (module for _, module in root.named_modules(seen))


def tensors_in(module: nn.Module) -> list[torch.Tensor]:
    """The parameters and buffers of a module without its children."""
    named = (module.__dict__["_parameters"], module.__dict__["_buffers"])
    return [tensor for tensors in named for tensor in tensors.values() if tensor is not None]
