"""Update rules of servers from optimizers."""

from __future__ import annotations

from typing import Any

import torch

from fastdist.ps.model.row_wise_adagrad import RowWiseAdagrad
from fastdist.ps.wire.specs import RuleSpec

# Options that do not change the result.
_IGNORED = frozenset({"foreach", "fused", "capturable", "differentiable"})
# Options that must have this value.
_FIXED = {"amsgrad": False}
_KINDS: dict[type[torch.optim.Optimizer], str] = {
    torch.optim.SGD: "SGD",
    torch.optim.Adagrad: "Adagrad",
    torch.optim.Adam: "Adam",
    torch.optim.AdamW: "AdamW",
    torch.optim.RMSprop: "RMSprop",
    RowWiseAdagrad: "RowWiseAdagrad",
}


def rule_of(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> RuleSpec:
    """Return the update rule for one group of parameters.

    Raises:
        ValueError: servers cannot apply this optimizer.
    """
    name = _KINDS.get(type(optimizer))
    if name is None:
        *of_torch, row_wise = _KINDS.values()
        raise ValueError(
            f"parameter servers cannot apply {type(optimizer).__name__}; expected one of "
            f"{', '.join(of_torch)} of torch.optim, or fd.ps.{row_wise} for embeddings"
        )
    options = options_of(optimizer, group)
    for key, value in _FIXED.items():
        if options.pop(key, value) != value:
            raise ValueError(
                f"parameter servers apply {name} with {key}={value}, got {group[key]!r}"
            )
    if name != "AdamW" and options.pop("decoupled_weight_decay", False):
        raise ValueError(f"{name} with decoupled_weight_decay=True is AdamW: use torch.optim.AdamW")
    options.pop("decoupled_weight_decay", None)
    rule = RuleSpec(name, options)
    rule.make()  # raises for an invalid option
    return rule


def options_of(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> dict[str, Any]:
    """Return a group's hyperparameters as plain numbers, without keys that others added."""
    return {
        key: value.item() if isinstance(value, torch.Tensor) else value
        for key, value in group.items()
        if key in optimizer.defaults and key not in _IGNORED
    }
