"""Describes the structure of modules, to detect changes that users make to them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn

from fastdist.training.modules import is_materialized


def structure_of(roots: Sequence[nn.Module]) -> list[object]:
    """Return the ids and types of modules and of their parameters, with dtypes and shapes.

    The result changes when a module or parameter is replaced, added or removed. Buffers do not
    count: forward replaces them, caches for instance, on each replica in its own time.
    """
    found: list[object] = []
    for module in modules_of(roots):
        found += (id(module), type(module))
        for parameter in module._parameters.values():
            if parameter is not None:
                shape = parameter.shape if is_materialized(parameter) else None
                found += (id(parameter), type(parameter), parameter.dtype, shape)
    return found


def modules_of(roots: Sequence[nn.Module]) -> Iterator[nn.Module]:
    """Yield every module once, in order of registration."""
    seen: set[nn.Module] = set()
    for root in roots:
        yield from (module for _, module in root.named_modules(seen))
