"""Update rules of servers from optimizers of torch."""

from __future__ import annotations

from typing import Any

import torch

from fastdist.ps.wire.specs import RuleSpec

# How torch computes, not what.
_NO_MATTER = frozenset({"foreach", "fused", "capturable", "differentiable"})
# What servers can do in one way only, and that way's value.
_FIXED = {"amsgrad": False}
_KINDS = {
    torch.optim.SGD: "SGD",
    torch.optim.Adagrad: "Adagrad",
    torch.optim.Adam: "Adam",
    torch.optim.AdamW: "AdamW",
    torch.optim.RMSprop: "RMSprop",
}


def rule_of(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> RuleSpec:
    """What a server does with the gradients of one group of parameters.

    Raises:
        ValueError: servers cannot do what this optimizer does.
    """
    name = _KINDS.get(type(optimizer))
    if name is None:
        known = ", ".join(_KINDS.values())
        raise ValueError(
            f"parameter servers cannot apply {type(optimizer).__name__}; expected one of {known} "
            "of torch.optim"
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
    rule.make()  # says what is wrong with an option
    return rule


def options_of(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> dict[str, Any]:
    """The hyperparameters of a group, as plain numbers, without what others keep in it."""
    return {
        key: value.item() if isinstance(value, torch.Tensor) else value
        for key, value in group.items()
        if key in optimizer.defaults and key not in _NO_MATTER
    }
