"""Describes the structure of modules, to detect changes that users make to them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn

from fastdist.training.modules import is_materialized


def structure_of(roots: Sequence[nn.Module]) -> list[object]:
    """Return the ids and types of modules and of their parameters, with dtypes and shapes.

    The result changes when a module or parameter is replaced, added or removed. Buffers do not
    count: forward may replace them, as caches, at different times on each replica.
    """
    found: list[object] = []
    for module in modules_of(roots):
        found += (id(module), type(module))
        for parameter in module._parameters.values():
            if parameter is not None:
                # Compare the types first: isinstance is slow for parameters.
                is_whole = type(parameter) is nn.Parameter or is_materialized(parameter)
                shape = parameter.shape if is_whole else None
                found += (id(parameter), type(parameter), parameter.dtype, shape)
    return found


def modules_of(roots: Sequence[nn.Module]) -> Iterator[nn.Module]:
    """Yield every module once, in order of registration.

    Four times as fast as `named_modules`, which makes names: every `run` visits all modules.
    """
    seen: set[nn.Module] = set()
    pending = list(reversed(roots))
    while pending:
        module = pending.pop()
        if module not in seen:
            seen.add(module)
            yield module
            pending += [m for m in reversed(module._modules.values()) if m is not None]
