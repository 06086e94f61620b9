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
    result = new_like(array, shape_of(array)) if out is None else out
    own = _flat(array)
    room = _flat(result) if _is_dense(result) else new_like(own, shape_of(own))
    if room.dtype != own.dtype:  # it is narrow
        room = new_like(own, shape_of(own))
    combine = getattr(_library(own), name)
    before: Any = None  # the reduction of the ranks before this one
    partial, reach = own, 1
    while reach < comm.world_size:
        to = comm.rank + reach if comm.rank + reach < comm.world_size else None
        source = comm.rank - reach if comm.rank >= reach else None
        earlier = None if source is None else new_like(own, shape_of(own))
        _exchange(comm, partial, to, earlier, source, timeout)
        if exclusive and earlier is not None:
            before = earlier if before is None else combine(earlier, before)
        if earlier is not None:
            partial = combine(earlier, partial, out=room)  # in place after the first round
        reach *= 2
    if exclusive:
        result[...] = empty if before is None else before.reshape(shape_of(array))
    elif partial is not room or not _is_dense(result) or room.dtype != result.dtype:
        result[...] = partial.reshape(shape_of(array))
    return result


def _exchange(
    comm: Ranks,
    sent: Array,
    to: int | None,
    received: Array | None,
    source: int | None,
    timeout: float | None,
) -> None:
    """Send to a rank and receive from another, together; either may be None."""
    if source is None and to is not None:
        comm.send(sent, to, timeout=timeout)
    elif to is None and source is not None:
        comm.recv(received, source, timeout=timeout)
    elif to is not None:
        with comm.group():
            comm.send(sent, to, timeout=timeout)
            comm.recv(received, source, timeout=timeout)


def _is_dense(array: Array) -> bool:
    if _is_torch(array):
        return bool(array.is_contiguous())
    return isinstance(array, np.ndarray) and array.flags.c_contiguous


def _flat(array: Array) -> Any:
    """Return the elements in a row, in the dtype in which they are computed."""
    own: Any = array if hasattr(array, "shape") else np.asarray(memoryview(array))
    is_narrow = str(own.dtype).removeprefix("torch.") in _NARROW
    if _is_torch(own):
        return (own.float() if is_narrow else own).reshape(-1)
    return (own.astype(np.float32) if is_narrow else own).reshape(-1)


def _is_torch(array: Array) -> bool:
    return type(array).__module__.partition(".")[0] == "torch"


def _library(array: Array) -> ModuleType:
    name = type(array).__module__.partition(".")[0]
    return sys.modules[name] if name in ("torch", "cupy") else np
