"""Ranks that have no more data take part in the collectives of those that have.

A rank that has joined announces a call of its own kind, which matches no collective: where others
still make one, all ranks get a mismatch, before any data moves. They then tell each other what they
called, and those that have joined make the same call with values that do not count.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

import fastdist._core as _core
from fastdist.collectives.arrays import NOT_IN_NUMPY, as_list, dtype_name, part_like, shape_of
from fastdist.collectives.engines.engine import OPS, Calls
from fastdist.collectives.engines.gpu_arrays import device_of
from fastdist.errors import CollectiveMismatchError, UnsupportedError

_JOINED = None  # what a rank tells that has joined
_MADE = ("all_reduce", "reduce", "reduce_scatter", "broadcast", "barrier")
_TOLD = ("op", "root", "compress")  # arguments that all ranks share


class Joining:
    """One rank in `Communicator.join`.

    Attributes:
        last_rank: the lowest of the ranks that joined last, once all have; None before.
    """

    def __init__(
        self,
        rank: int,
        plain: Calls,
        ranks: _core.Communicator,
        tell: Callable[[Any], Sequence[Any]],
    ) -> None:
        self.last_rank: int | None = None
        self._rank = rank
        self._plain = plain
        self._ranks = ranks
        self._tell = tell  # exchanges objects between all ranks

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
            forms = [(dtype_name(array), shape_of(array)) for array in arrays]
            own = (name, bool(given) and arrays is given[0], forms, told)
            calls = self._tell(own)
            joined = [rank for rank, theirs in enumerate(calls) if theirs is _JOINED]
            if not joined or any(theirs not in (_JOINED, own) for theirs in calls):
                raise
        if not _can_be_made(name, told, joined):
            raise UnsupportedError(f"{name} needs data of ranks that have joined: {joined}")
        return call()

    def take_part(self, timeout_s: float) -> None:
        """Make the other ranks' calls until all ranks have joined."""
        made = 0
        while True:
            try:
                self._ranks.compare("join", "uint8", "sum", 0, 0, 0, timeout_s)
                break
            except CollectiveMismatchError:
                calls = self._tell(_JOINED)
            joined = [rank for rank, theirs in enumerate(calls) if theirs is _JOINED]
            theirs = [call for call in calls if call is not _JOINED]
            op, is_list, forms, told = theirs[0]
            made += 1
            if any(call != theirs[0] for call in theirs) or not _can_be_made(op, told, joined):
                continue  # it is an error there
            arrays = [_neutral(told.get("op"), *form) for form in forms]
            given: list[Any] = [arrays] if is_list else arrays
            if op == "reduce_scatter":
                told = told | {"out": part_like(given[0], len(calls))}
            getattr(self._plain, op)(*given, **told)
        self.last_rank = int(np.argmin(self._tell(made)))


def _can_be_made(op: str, told: dict[str, Any], joined: Sequence[int]) -> bool:
    return op in _MADE and told.get("root") not in joined


def _neutral(op: str | None, dtype: str, shape: tuple[int, ...]) -> Any:
    """Return an array that does not change a reduction."""
    library: Any = importlib.import_module("ml_dtypes") if dtype in NOT_IN_NUMPY else np
    kind = np.dtype(getattr(library, dtype) if dtype in NOT_IN_NUMPY else dtype)
    if op not in ("prod", "min", "max", "and"):
        return np.zeros(shape, kind)
    if op == "prod" or kind.kind == "b":
        return np.full(shape, op != "max", kind)
    limits = library.iinfo(kind) if kind.kind in "iu" else library.finfo(kind)
    if op == "and":
        return np.full(shape, -1 if kind.kind == "i" else limits.max, kind)
    return np.full(shape, limits.max if op == "min" else limits.min, kind)
