"""Modules that make their parameters in the first forward, when they know the shapes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin


def when_initialized(roots: Sequence[nn.Module], then: Callable[[nn.Module], None]) -> None:
    """Call `then(module)` once for each lazy module inside, when it has just made its parameters.

    That is before it computes with them, in the thread that runs its first forward.
    """
    for root in roots:
        for module in root.modules():
            if isinstance(module, LazyModuleMixin) and module.has_uninitialized_params():
                _call_once(module, then)


def _call_once(module: nn.Module, then: Callable[[nn.Module], None]) -> None:
    def initialized(module: nn.Module, inputs: Any) -> None:
        handle.remove()
        then(module)

    # Hooks run in the order in which they came: the module's own, which initializes it, is first.
    handle = module.register_forward_pre_hook(initialized)
