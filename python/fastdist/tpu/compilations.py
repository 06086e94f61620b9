"""Counts the programs that XLA compiles for a strategy's runs, and explains repeated compilations.

A trace that differs from earlier traces is compiled, which takes seconds to minutes and should
happen once for each function that is given to `run`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

from fastdist.replicas.per_replica import leaves
from fastdist.tpu.stacked import is_stacked


class Compilations:
    """The compilations of each function, with the shapes of its arguments.

    Attributes:
        count: the number of compiled programs.
        repeated: the number of programs compiled for a function that had a program already.
    """

    def __init__(self) -> None:
        self.count = 0
        self.repeated = 0
        self._shapes: dict[object, list[str]] = {}

    def note(self, fn: Callable[..., Any], given: Any, compiled: int) -> None:
        """Record the programs that a run of `fn` compiled; warn if it had a program already.

        The warning points at the line that called `run`, six calls up.
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
    """Describe the shapes and dtypes of the arguments of `run`."""
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
            f"replica; earlier shapes: {'; '.join(known)}. Use batches of one size, or "
            "distribute_dataset, which pads them"
        )
    return (
        f"run of {name} was compiled again for the shapes that it had before, {shapes}: its trace "
        "differed, because a Python value changed or because it made state the first time"
    )
