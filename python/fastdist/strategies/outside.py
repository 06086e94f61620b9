"""Refuses to step optimizers that a strategy does not know."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook


class OutsideOptimizers:
    """A `with` statement in which optimizers made outside the scope cannot step inside ones.

    Where several replicas share a process, such an optimizer would change replica 0 alone.
    """

    def __init__(self) -> None:
        self._parameters: set[int] = set()
        self._optimizers: list[torch.optim.Optimizer] = []

    def allow(
        self, optimizers: Iterable[torch.optim.Optimizer], parameters: Iterable[torch.Tensor]
    ) -> None:
        """Name the strategy's own: optimizers, and the parameters that only they may change."""
        self._optimizers = list(optimizers)
        self._parameters = {id(parameter) for parameter in parameters}

    def __enter__(self) -> None:
        self._handle = register_optimizer_step_pre_hook(self._check)

    def __exit__(self, *_: object) -> None:
        self._handle.remove()

    def _check(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if any(optimizer is known for known in self._optimizers):
            return
        for group in optimizer.param_groups:
            if any(id(parameter) in self._parameters for parameter in group["params"]):
                raise ValueError(
                    f"{type(optimizer).__name__} was made outside the scope of the strategy whose "
                    "parameters it holds; make it inside `with strategy.scope():`"
                )
