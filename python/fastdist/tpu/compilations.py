"""Counts the programs that XLA compiles for a strategy's runs, and says why where it does so again.

A program is compiled when something new is traced. That takes seconds to minutes, and should happen
once for each function that `run` is given.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

from fastdist.replicas.per_replica import leaves
from fastdist.tpu.stacked import is_stacked


class Compilations:
    """What was compiled for which function and which shapes.

    Attributes:
        count: programs that were compiled.
        repeated: of them, how many for a function that had one already.
    """

    def __init__(self) -> None:
        self.count = 0
        self.repeated = 0
        self._shapes: dict[object, list[str]] = {}

    def note(self, fn: Callable[..., Any], given: Any, compiled: int) -> None:
        """A run of `fn` has compiled so many programs; warns where it had one already.

        The warning is about the line that called `run`, six calls up.
        """
        if not compiled:
            return
        shapes = shapes_of(given)
        known = self._shapes.setdefault(getattr(fn, "__code__", fn), [])
        self.count += compiled
        if known:
            self.repeated += compiled
            warnings.warn(_why(fn, shapes, known), stacklevel=7)
        known.append(shapes)


def shapes_of(given: Any) -> str:
    """The shapes and dtypes of what `run` is given, one after the other."""
    return ", ".join(filter(None, map(_shape_of, leaves(given)))) or "nothing"


def _shape_of(leaf: Any) -> str:
    tensor = leaf.values[0].tensor if is_stacked(leaf) else leaf
    if not isinstance(tensor, torch.Tensor):
        return ""
    shape = tuple(tensor.shape[1:] if is_stacked(leaf) else tensor.shape)
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(shape)}"


def _why(fn: Callable[..., Any], shapes: str, known: list[str]) -> str:
    name = getattr(fn, "__qualname__", repr(fn))
    if shapes not in known:
        return (
            f"run of {name} was compiled again, for arguments of new shapes: {shapes} for each "
            f"replica; before it was given {'; '.join(known)}. Let batches have one size, or use "
            "distribute_dataset, which fills them up"
        )
    return (
        f"run of {name} was compiled again for the shapes that it had before, {shapes}: it did "
        "something else, by a Python value that changed or by state that it made the first time"
    )
