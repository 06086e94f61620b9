"""Checks that a saved state fits an object, before anything is changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn.parameter import is_lazy

_MOST_NAMES = 10


def require_match(name: str, part: Any, value: Any, class_name: str) -> None:
    """Check that a part of a checkpoint, which is not a module, can take a saved state."""
    # An optimizer, or a scheduler, accepts the state of another class.
    if hasattr(part, "load_state_dict") and not any(
        base.__name__ == class_name for base in type(part).__mro__
    ):
        raise ValueError(
            f"{name}: the checkpoint has the state of an object of class {class_name}, expected "
            f"{type(part).__name__}"
        )
    if isinstance(part, torch.optim.Optimizer):
        _require_same_groups(name, part, value)
    elif isinstance(part, torch.Tensor) and (
        not isinstance(value, torch.Tensor) or value.shape != part.shape
    ):
        raise ValueError(f"{name}: expected a tensor of {_shape(part)}, got {_shape(value)}")


def require_same_tensors(name: str, own: Mapping[str, Any], saved: Any) -> None:
    """Check that a module whose state_dict is `own` can take a saved one."""
    if not isinstance(saved, Mapping):
        raise ValueError(f"{name}: expected the state of a module, got {type(saved).__name__}")
    found = {
        "not in the checkpoint": [f"{key} {_shape(own[key])}" for key in own if key not in saved],
        "not in the model": [f"{key} {_shape(saved[key])}" for key in saved if key not in own],
        "of another shape": [
            f"{key}: {_shape(own[key])} here, {_shape(saved[key])} saved"
            for key in own
            if key in saved and _differ(own[key], saved[key])
        ],
    }
    if lines := [f"{what}: {_listed(names)}" for what, names in found.items() if names]:
        raise ValueError(f"{name}: the checkpoint is of another model; " + "; ".join(lines))


def _require_same_groups(name: str, optimizer: torch.optim.Optimizer, saved: Any) -> None:
    own = [len(group["params"]) for group in optimizer.param_groups]
    try:
        there = [len(group["params"]) for group in saved["param_groups"]]
    except (TypeError, KeyError, IndexError):
        raise ValueError(f"{name}: the checkpoint's state is not an optimizer's") from None
    if own != there:
        raise ValueError(
            f"{name}: the checkpoint is of another optimizer: its groups have {there} parameters, "
            f"expected {own}"
        )


def _differ(own: Any, saved: Any) -> bool:
    if not isinstance(own, torch.Tensor) or is_lazy(own):
        return False
    return not isinstance(saved, torch.Tensor) or own.shape != saved.shape


def _shape(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    return "not initialized" if is_lazy(value) else str(tuple(value.shape))


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(names[:_MOST_NAMES]) + more
