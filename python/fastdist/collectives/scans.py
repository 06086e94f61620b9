"""Reductions over the ranks up to each one, by messages that double their reach."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from math import prod
from typing import Any

import numpy as np

from fastdist.collectives.arrays import dtype_name, new_like, require_writable, shape_of
from fastdist.collectives.hints import unknown_op
from fastdist.collectives.types import Array, Ranks
from fastdist.collectives.uneven import require_same

# The names of numpy and cupy for each operation, and what no rank adds up to.
_FUNCTIONS = {
    "sum": ("add", 0),
    "prod": ("multiply", 1),
    "min": ("minimum", None),
    "max": ("maximum", None),
    "and": ("bitwise_and", None),
    "or": ("bitwise_or", 0),
    "xor": ("bitwise_xor", 0),
}
_PIECE_BYTES = 1 << 17  # what is received is added while the core's own cache has it
_NARROW = ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")  # computed in float32


def scan(
    comm: Ranks, array: Array, op: str, out: Array | None, timeout: float | None, *, exclusive: bool
) -> Array:
    """Reduce the arrays of the ranks up to this one, or up to the one before if `exclusive`."""
    if op not in _FUNCTIONS:
        raise ValueError(unknown_op(op, _FUNCTIONS))
    name, empty = _FUNCTIONS[op]
    if exclusive and empty is None:
        raise ValueError(f'an exclusive scan by "{op}" has no value on rank 0')
    shape, dtype = shape_of(array), dtype_name(array)
    is_float = "float" in dtype or dtype == ""
    if (name.startswith("bitwise") and (is_float or "complex" in dtype)) or (
        op in ("min", "max") and "complex" in dtype
    ):
        raise TypeError(f'op="{op}" is not defined for dtype {dtype}')
    result = new_like(array, shape) if out is None else out
    if (shape_of(result), dtype_name(result)) != (shape, dtype):
        raise ValueError(
            f"out must have the array's shape {shape} and dtype {dtype}, got "
            f"{shape_of(result)} and {dtype_name(result)}"
        )
    require_writable(result)
    own = _flat(array)
    library = type(own).__module__.partition(".")[0]
    combine = getattr(sys.modules[library] if library in ("torch", "cupy") else np, name)
    require_same(comm, "scan", dtype, op, int(exclusive), prod(shape), shape, timeout)
    flat = None if dtype in _NARROW else _elements(result)
    target: Any = new_like(own, shape_of(own)) if flat is None else flat
    is_free = flat is None or not np.may_share_memory(flat, own)
    if not is_free and own.ctypes.data != target.ctypes.data:
        own, is_free = own.copy(), True
    count = shape_of(own)[0]
    step = _PIECE_BYTES // own.itemsize if isinstance(own, np.ndarray) else max(1, count)
    with np.errstate(all="ignore"):  # as in all_reduce, whatever one rank has set
        for begin in range(0, count, step):
            piece, room = own[begin : begin + step], target[begin : begin + step]
            value = _scan(comm, combine, piece, room, is_free, exclusive, timeout)
            if value is not room:
                room[...] = empty if value is None else value
    if flat is None:
        _write(result, target)
    return result


def _scan(
    comm: Ranks,
    combine: Callable[..., Any],
    own: Any,
    room: Any,
    is_free: bool,
    exclusive: bool,
    timeout: float | None,
) -> Any:
    """Return the reduction of one piece, in `room` if possible; None for no ranks."""
    before: Any = None  # the reduction of the ranks before this one
    partial, spare, reach = own, None if exclusive else room, 1
    while reach < comm.world_size:
        to = comm.rank + reach if comm.rank + reach < comm.world_size else None
        source = comm.rank - reach if comm.rank >= reach else None
        earlier = None
        if source is not None:
            earlier = room if reach == 1 and is_free else new_like(own, shape_of(own))
        is_middle = to is not None and source is not None
        with comm.group() if is_middle else nullcontext():
            if to is not None:
                comm.send(partial, to, timeout=timeout)
            if source is not None:
                comm.recv(earlier, source, timeout=timeout)
        if earlier is not None and exclusive:
            before = earlier if before is None else combine(earlier, before, out=before)
        reach *= 2
        if earlier is not None and (not exclusive or comm.rank + reach < comm.world_size):
            partial = spare = combine(earlier, partial, out=spare)
    return before if exclusive else partial


def _flat(array: Array) -> Any:
    """Return the elements in a row, in the dtype in which they are computed, of numpy or cupy.

    Tensors on GPUs stay torch's.
    """
    is_narrow = dtype_name(array) in _NARROW
    if _is_torch(array):
        tensor: Any = array.detach().resolve_conj().resolve_neg()
        tensor = (tensor.float() if is_narrow else tensor).contiguous().reshape(-1)
        return tensor if tensor.is_cuda else tensor.numpy()
    own: Any = array if hasattr(array, "shape") else np.asarray(memoryview(array))
    return (own.astype(np.float32) if is_narrow else own).ravel()  # a copy of a view with gaps


def _elements(result: Array) -> np.ndarray[Any, Any] | None:
    """View the elements of a result in host memory that lie in a row; None for others."""
    if _is_torch(result):
        is_plain = not (result.is_cuda or result.is_conj() or result.is_neg())
        is_in_a_row = is_plain and result.is_contiguous()
        return result.detach().reshape(-1).numpy() if is_in_a_row else None
    is_in_a_row = isinstance(result, np.ndarray) and result.flags.c_contiguous
    return result.reshape(-1) if is_in_a_row else None


def _write(result: Array, value: Any) -> None:
    """Write the elements into an array of any library."""
    if _is_torch(result):
        result = result.detach()
        if isinstance(value, np.ndarray):
            value = sys.modules["torch"].from_numpy(value)
    elif not hasattr(result, "shape"):
        result = np.asarray(memoryview(result))
    result[...] = value.reshape(shape_of(result))


def _is_torch(array: Array) -> bool:
    return hasattr(array, "detach")
