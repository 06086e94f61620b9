"""What modules consist of, to tell whether copies of them still fit: tensors, classes, hooks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from fastdist.training.gradients import GradientHook
from fastdist.training.modules import is_materialized


def structure_of(roots: Sequence[nn.Module]) -> list[object]:
    """What two states of modules must have in common for twins of one to fit the other."""
    found: list[object] = []
    for module in modules_of(roots):
        found += (id(module), type(module))
        for tensor in tensors_in(module):
            shape = tensor.shape if is_materialized(tensor) else None
            found += (id(tensor), type(tensor), tensor.dtype, shape)
    return found


def hooks_of(roots: Sequence[nn.Module]) -> list[int]:
    """The ids of the hooks that users have put at modules and their tensors."""
    found: list[int] = []
    for module in modules_of(roots):
        for name in _MODULE_HOOKS:
            found += module.__dict__[name]
        for tensor in tensors_in(module):
            for name in _TENSOR_HOOKS:
                found += _user_hooks(tensor, name)
    return found


_MODULE_HOOKS = (
    "_forward_pre_hooks",
    "_forward_hooks",
    "_backward_pre_hooks",
    "_backward_hooks",
)
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


def buffers_of(roots: Sequence[nn.Module], recurse: bool = True) -> list[torch.Tensor]:
    """The buffers of modules, and of their children, that have been made."""
    modules = modules_of(roots) if recurse else roots
    named = [buffer for module in modules for buffer in module.__dict__["_buffers"].values()]
    return [buffer for buffer in named if buffer is not None and is_materialized(buffer)]


def tensors_of(roots: Sequence[nn.Module]) -> list[torch.Tensor]:
    """The parameters and buffers of modules, those that are shared as often as they occur."""
    return [tensor for module in modules_of(roots) for tensor in tensors_in(module)]
