"""Ranks that have no more data take part in the collectives of those that have.

A rank that has joined announces a call of its own kind, which matches no collective: where others
still make one, all ranks get a mismatch, before any data moves. They then tell each other what they
called, and those that have joined make the same call with values that do not count.
"""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np

from fastdist.collectives.arrays import NOT_IN_NUMPY, as_list, dtype_name, part_like, shape_of
from fastdist.collectives.engines.engine import OPS, Calls
from fastdist.collectives.engines.gpu_arrays import device_of
from fastdist.collectives.types import Array, Ranks
from fastdist.errors import CollectiveMismatchError, UnsupportedError

_JOINED = None  # what a rank tells that has joined
_MADE = ("all_reduce", "reduce", "reduce_scatter", "broadcast", "barrier")
_TOLD = ("op", "root", "compress")  # arguments that all ranks share
_Form = tuple[str, tuple[int, ...], tuple[int, ...]]  # dtype, lengths, axes from the outermost on


class Joining:
    """One rank in `Communicator.join`.

    Attributes:
        last_rank: the lowest of the ranks that joined last, once all have; None before.
    """

    def __init__(self, comm: Ranks) -> None:
        self.last_rank: int | None = None
        self._comm = comm
        self._plain: Calls = comm.calls

    def calls(self) -> Calls:
        """Return the collectives of a rank that still has data."""
        own = {op: partial(self._call, op) for op in OPS if op not in ("send", "recv")}
        return Calls(send=self._plain.send, recv=self._plain.recv, **own)

    def _call(self, name: str, /, *given: Any, **keywords: Any) -> Any:
        arrays = as_list(given[0]) if given else []
        if keywords["async_op"] or any(device_of(array) is not None for array in arrays):
            raise ValueError(f"{name} in a join takes arrays on the host, and no async_op")
        call = partial(getattr(self._plain, name), *given, **keywords)
        try:
            return call()
        except CollectiveMismatchError:
            told = {key: keywords[key] for key in _TOLD if key in keywords}
            out = keywords.get("out")
            # What is not the root's is ignored.
            used = as_list(out) if name == "broadcast" and out is not None else arrays
            is_list = bool(given) and arrays is given[0]
            own = (name, is_list, [_form(array) for array in used], told)
            calls = self._tell(own)
            joined = [rank for rank, theirs in enumerate(calls) if theirs is _JOINED]
            if not joined or not _agree([call for call in calls if call is not _JOINED]):
                raise
        if not _can_be_made(name, told, joined):
            raise UnsupportedError(f"{name} needs data of ranks that have joined: {joined}")
        return call()

    def _tell(self, call: Any) -> list[Any]:
        with self._comm._calling(self._plain, None):
            told: list[Any] = self._comm.all_gather_object(call)
        return told

    def take_part(self) -> None:
        """Make the other ranks' calls until all ranks have joined."""
        made, ranks, timeout_s = 0, self._comm.engine.compiled, self._comm.timeout_s
        while True:
            try:
                ranks.compare("join", "uint8", "sum", 0, 0, 0, timeout_s)
                break
            except CollectiveMismatchError:
                calls = self._tell(_JOINED)
            joined = [rank for rank, call in enumerate(calls) if call is _JOINED]
            theirs = [call for call in calls if call is not _JOINED]
            # Of ranks that agree, one whose arrays are not all flat.
            op, is_list, forms, told = max(theirs, key=lambda call: not _are_flat(call[2]))
            made += 1
            if not _agree(theirs) or not _can_be_made(op, told, joined):
                continue  # it is an error there
            arrays = [_neutral(told.get("op"), *form) for form in forms]
            given: list[Any] = [arrays] if is_list else arrays
            if op == "reduce_scatter":
                told = told | {"out": part_like(given[0], len(calls))}
            with suppress(CollectiveMismatchError):  # such as of shapes; it is an error there too
                getattr(self._plain, op)(*given, **told)
        self.last_rank = int(np.argmin(self._tell(made)))


def _can_be_made(op: str, told: dict[str, Any], joined: Sequence[int]) -> bool:
    return op in _MADE and told.get("root") not in joined


def _form(array: Array) -> _Form:
    """Return what ranks compare of an array."""
    shape = shape_of(array)
    stride = getattr(array, "stride", None)  # torch's
    strides = stride() if callable(stride) else getattr(array, "strides", None)
    long = [axis for axis, length in enumerate(shape) if length > 1]
    order = sorted(long, key=lambda axis: -strides[axis]) if strides else long
    if order == long:  # row-major
        return dtype_name(array), shape or (1,), tuple(range(max(1, len(shape))))
    short = [axis for axis, length in enumerate(shape) if length <= 1]
    return dtype_name(array), shape, (*short, *order)


def _are_flat(forms: Sequence[_Form]) -> bool:
    """Return True if arrays match others of their sizes: one array, or flat ones in a list."""
    return len(forms) == 1 or all(len(shape) == 1 for _, shape, _ in forms)


def _flat(form: _Form) -> _Form:
    """Return the form of a flat array in place of a row-major one."""
    dtype, shape, order = form
    return (dtype, (math.prod(shape),), (0,)) if list(order) == sorted(order) else form


def _agree(calls: Sequence[Any]) -> bool:
    """Return True if ranks make one call, by the rule of `matches` in csrc/core/signature.h."""
    shaped = [forms for _, _, forms, _ in calls if not _are_flat(forms)]
    alike = [(op, is_list, list(map(_flat, forms)), told) for op, is_list, forms, told in calls]
    return all(each == alike[0] for each in alike) and all(each == shaped[0] for each in shaped)


def _neutral(op: str | None, dtype: str, shape: tuple[int, ...], order: tuple[int, ...]) -> Any:
    """Return an array that does not change a reduction."""
    lengths = [shape[axis] for axis in order]
    back = [order.index(axis) for axis in range(len(order))]
    if dtype in NOT_IN_NUMPY and "torch" in sys.modules:
        torch = sys.modules["torch"]
        kind = getattr(torch, dtype)
        made = torch.full(lengths, _value(op, "f", torch.finfo(kind), dtype))
        return made.to(kind).permute(back)
    library: Any = importlib.import_module("ml_dtypes") if dtype in NOT_IN_NUMPY else np
    kind = np.dtype(getattr(library, dtype) if dtype in NOT_IN_NUMPY else dtype)
    limits = None
    if kind.kind not in "bc":
        limits = library.iinfo(kind) if kind.kind in "iu" else library.finfo(kind)
    return np.full(lengths, _value(op, kind.kind, limits, dtype), kind).transpose(back)


def _value(op: str | None, kind: str, limits: Any, dtype: str) -> Any:
    """Return the number that does not count in a reduction; `kind` is a letter of numpy's."""
    if op not in ("prod", "min", "max", "and"):
        return 0
    if op == "prod" or kind == "b":
        return op != "max"
    if op == "and":
        return -1 if kind == "i" else limits.max
    if kind in "iu" or dtype == "float8_e4m3fn":  # which has no infinity
        return limits.max if op == "min" else limits.min
    return math.inf if op == "min" else -math.inf
