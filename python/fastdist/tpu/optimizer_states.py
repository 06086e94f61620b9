"""Makes optimizer states before the first step, so that all steps share one program.

torch's optimizers make their states in the first step, mostly as zeros. A program that makes states
differs from a program that reads them and would be compiled for one step only. Therefore a twin of
the optimizer takes one step on CPU copies of the parameters with zero gradients, and the first
values that it writes to its states become the states of the optimizer.

No states are made for optimizers outside torch, or if the first step is a different computation
(SGD with dampening, LBFGS); their first step is compiled separately.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

_WITHOUT = ("LBFGS", "SparseAdam")


class _Recorded(dict[Any, Any]):
    """The state of a parameter, with the first value of each entry."""

    def __init__(self) -> None:
        super().__init__()
        self.first: dict[Any, Any] = {}

    def __setitem__(self, key: Any, value: Any) -> None:
        is_tensor = isinstance(value, torch.Tensor)
        self.first.setdefault(key, value.detach().clone() if is_tensor else value)
        super().__setitem__(key, value)


def make_states(
    optimizer: torch.optim.Optimizer, place: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """Make the states of an optimizer that has not taken a step.

    Args:
        place: a function that moves a tensor to the parameters' device. Scalars (tensors without
            axes) stay on the CPU, where optimizers read them.
    """
    for parameters in optimizer.state.values():
        for key, value in parameters.items():
            if isinstance(value, torch.Tensor) and value.dim():
                parameters[key] = place(value)
    if optimizer.state or not _may_begin_with_states(optimizer):
        return
    twin, originals = _twin(optimizer)
    twin.step()
    for copy, recorded in twin.state.items():
        optimizer.state[originals[id(copy)]] = {
            key: place(value) if isinstance(value, torch.Tensor) and value.dim() else value
            for key, value in recorded.first.items()
        }


def _may_begin_with_states(optimizer: torch.optim.Optimizer) -> bool:
    kind = type(optimizer)
    if not kind.__module__.startswith("torch.optim") or kind.__name__ in _WITHOUT:
        return False
    return not any(
        group.get("dampening") or group.get("capturable") or group.get("fused")
        for group in optimizer.param_groups
    )


def _twin(optimizer: torch.optim.Optimizer) -> tuple[Any, dict[int, nn.Parameter]]:
    originals: dict[int, nn.Parameter] = {}
    twin: Any = object.__new__(type(optimizer))
    twin.__dict__.update(optimizer.__dict__)
    twin.__dict__.pop("step", None)  # a scheduler's wrapper, bound to the original
    for name in list(twin.__dict__):
        if name.endswith("_hooks"):
            twin.__dict__[name] = type(twin.__dict__[name])()
    twin.state = defaultdict(_Recorded)
    twin.param_groups = []
    for group in optimizer.param_groups:
        copies = []
        for parameter in group["params"]:
            copy = nn.Parameter(parameter.detach().cpu().clone(), parameter.requires_grad)
            if parameter.requires_grad:
                copy.grad = torch.zeros_like(copy)
            originals[id(copy)] = parameter
            copies.append(copy)
        # With weight decay, SGD's first momentum would include a share of the parameters.
        twin.param_groups.append({**group, "params": copies, "weight_decay": 0.0})
    return twin, originals
