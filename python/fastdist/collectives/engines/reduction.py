"""Reductions in rank order, for engines written in Python.

They round like the compiled engine's kernels: 16-bit and 8-bit floats are accumulated in float32
and rounded once, integers wrap around, the sum of bools is `or`, and a mean divides once, at the
end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from fastdist.collectives.engines.views import SMALL_FLOATS, View

Array = np.ndarray[Any, Any]

_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "sum": np.add,
    "mean": np.add,
    "prod": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}
_OF_BOOLS = {"sum": "or", "max": "or", "prod": "and", "min": "and"}

# Beyond this limit float8_e4m3fn rounds to NaN; torch would saturate to the largest number.
_E4M3_LIMIT = 464.0


def accumulates_wide(op: str, dtype: str) -> bool:
    """Return True if a reduction accumulates in float32 and rounds at the end."""
    return dtype in SMALL_FLOATS and op in ("sum", "mean", "prod")


def reduce_in_order(parts: Sequence[View], op: str, out: View) -> None:
    """Reduce arrays of one dtype into `out`, from the first to the last."""
    name = _OF_BOOLS.get(op, op) if out.dtype == "bool" else op
    function = _FUNCTIONS[name]
    with np.errstate(all="ignore"):
        if out.dtype in SMALL_FLOATS:
            total = widen(parts[0])
            for part in parts[1:]:
                function(total, widen(part), out=total)
            if op == "mean":
                divide(total, len(parts))
            narrow(total, out)
            return
        if out.address != parts[0].address:
            out.flat[...] = parts[0].flat
        for part in parts[1:]:
            function(out.flat, part.flat, out=out.flat)
        if op == "mean":
            divide(out.flat, len(parts))


def widen(view: View) -> Array:
    """Copy an array to float32."""
    if isinstance(view.flat, np.ndarray):
        return view.flat.astype(np.float32)
    import torch

    wide: Array = view.flat.to(torch.float32).numpy()
    return wide


def narrow(wide: Array, out: View) -> None:
    """Round float32 numbers into an array of a narrower format."""
    with np.errstate(all="ignore"):
        if isinstance(out.flat, np.ndarray):
            out.flat[...] = wide.astype(out.flat.dtype)
            return
        import torch

        if out.dtype == "float8_e4m3fn":
            wide = np.where(np.abs(wide) > _E4M3_LIMIT, np.float32(np.nan), wide)
        out.flat.copy_(torch.from_numpy(np.ascontiguousarray(wide)))


def divide(total: Array, n: int) -> None:
    """Divide in place; complex numbers by parts, since numpy's own division rounds twice."""
    parts = total.view(total.real.dtype)
    np.divide(parts, parts.dtype.type(n), out=parts)
