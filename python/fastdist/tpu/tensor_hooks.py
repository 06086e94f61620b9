"""Copies users' hooks from a tensor to the tensor that replaces it."""

from __future__ import annotations

from typing import Any

import torch

from fastdist.training.contributions import GradientHook
from fastdist.training.modules import is_materialized

_TENSOR_HOOKS = {
    "_backward_hooks": torch.Tensor.register_hook,
    "_post_accumulate_grad_hooks": torch.Tensor.register_post_accumulate_grad_hook,
}


def _user_hooks(tensor: torch.Tensor, name: str) -> dict[int, Any]:
    hooks = (getattr(tensor, name) or {}) if is_materialized(tensor) else {}
    return {key: hook for key, hook in hooks.items() if not isinstance(hook, GradientHook)}


def copy_hooks(source: torch.Tensor, target: torch.Tensor) -> None:
    """Register the hooks that users have put on `source` on `target` too."""
    for name, register in _TENSOR_HOOKS.items():
        for hook in _user_hooks(source, name).values():
            register(target, hook)  # type: ignore[no-untyped-call]
