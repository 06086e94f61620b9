"""Reductions over the ranks up to each one, by messages that double their reach."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import numpy as np

from fastdist.collectives.arrays import new_like, shape_of
from fastdist.collectives.hints import unknown_op
from fastdist.collectives.types import Array, Ranks

# The names of numpy, torch and cupy for each operation, and what no rank adds up to.
_FUNCTIONS = {
    "sum": ("add", 0),
    "prod": ("multiply", 1),
    "min": ("minimum", None),
    "max": ("maximum", None),
    "and": ("bitwise_and", None),
    "or": ("bitwise_or", 0),
    "xor": ("bitwise_xor", 0),
}
_NARROW = ("float16", "bfloat16")  # computed in float32


def scan(
    comm: Ranks,
    array: Array,
    op: str,
    out: Array | None,
    timeout: float | None,
    *,
    exclusive: bool,
) -> Array:
    """Reduce the arrays of ranks 0 to this one, or to the one before if `exclusive`."""
    if op not in _FUNCTIONS:
        raise ValueError(unknown_op(op, _FUNCTIONS))
    name, empty = _FUNCTIONS[op]
    if exclusive and empty is None:
        raise ValueError(f'an exclusive scan by "{op}" has no value on rank 0')
    own = array if hasattr(array, "shape") else np.asarray(memoryview(array))
    combine = getattr(_library(own), name)
    dtype = str(own.dtype).removeprefix("torch.")
    partial: Any = own
    if dtype in _NARROW:
        partial = own.float() if _is_torch(own) else own.astype(np.float32)
    before: Any = None  # the reduction of the ranks before this one
    reach = 1
    while reach < comm.world_size:
        earlier = new_like(partial, shape_of(partial)) if comm.rank >= reach else None
        with comm.group():
            if comm.rank + reach < comm.world_size:
                comm.send(partial, comm.rank + reach, timeout=timeout)
            if earlier is not None:
                comm.recv(earlier, comm.rank - reach, timeout=timeout)
        if earlier is not None:
            before = earlier if before is None else combine(earlier, before)
            partial = combine(earlier, partial)
        reach *= 2
    result = before if exclusive else partial
    if out is None:
        out = new_like(own, shape_of(own))
    out[...] = empty if result is None else result
    return out


def _is_torch(array: Array) -> bool:
    return type(array).__module__.partition(".")[0] == "torch"


def _library(array: Array) -> ModuleType:
    name = type(array).__module__.partition(".")[0]
    return sys.modules[name] if name in ("torch", "cupy") else np
