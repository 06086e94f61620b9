"""Calls back when lazy modules, which infer shapes in their first forward, make parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin


def when_initialized(roots: Sequence[nn.Module], then: Callable[[nn.Module], None]) -> None:
    """Call `then(module)` for each lazy module in `roots` when it has made its parameters.

    The call happens once per module, in the thread that runs its first forward, before the module
    computes with the parameters.
    """
    for root in roots:
        for module in root.modules():
            if isinstance(module, LazyModuleMixin) and module.has_uninitialized_params():
                _call_once(module, then)


def _call_once(module: nn.Module, then: Callable[[nn.Module], None]) -> None:
    def initialized(module: nn.Module, inputs: Any) -> None:
        handle.remove()
        then(module)

    # Hooks run in order of registration: the module's own hook, which initializes it, runs first.
    handle = module.register_forward_pre_hook(initialized)
