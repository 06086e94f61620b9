"""Messages for arguments that other libraries take and fastdist does not."""

from __future__ import annotations

from collections.abc import Iterator
from numbers import Number
from typing import Any

from fastdist.collectives.arguments import REDUCE_OPS

_OTHER_NAMES = {
    "add": "sum",
    "average": "mean",
    "avg": "mean",
    "band": "and",
    "bor": "or",
    "bxor": "xor",
    "maximum": "max",
    "minimum": "min",
    "product": "prod",
}
_IMMUTABLE = frozenset({"jax", "jaxlib", "tensorflow"})


def not_an_array(argument: str, got: Any) -> str:
    """Return the message for an object that is no array."""
    hint = ""
    if isinstance(got, (Number, list, tuple)):
        hint = "; pass numpy.array(x)"
    elif isinstance(got, Iterator):
        hint = "; pass a list of arrays"
    elif isinstance(got, dict):
        hint = "; pass list(x.values())"
    elif hasattr(got, "to_numpy"):
        hint = "; pass x.to_numpy()"
    name = type(got).__name__
    return f"{argument} must be a numpy, torch or other DLPack array, got {name}{hint}"


def unknown_op(op: Any) -> str:
    """Return the message for an unknown reduction, such as `torch.distributed.ReduceOp.AVG`."""
    name = str(op).rpartition(".")[2].lower()
    name = _OTHER_NAMES.get(name, name)
    hint = f'; use op="{name}"' if name in REDUCE_OPS else ""
    return f"op must be sum, mean, prod, min, max, and, or or xor, got {op!r}{hint}"


def unknown_keyword(call: str, name: str) -> str:
    """Return the message for a keyword that a call with a root does not take."""
    hint = "; use root=" if name in ("src", "dst") else ""
    return f"{call} got an unexpected keyword argument {name!r}{hint}"


def immutable(argument: str, got: Any) -> str:
    """Return the message for an array that must not be changed; "" for other arrays."""
    if not is_immutable(got):
        return ""
    library = type(got).__module__.partition(".")[0].removesuffix("lib")
    return (
        f"{argument} must be writable, got an array of {library}, whose arrays never change; use "
        "out=, or take the result of the call"
    )


def is_immutable(arrays: Any) -> bool:
    """Return True if the library of an array, or of one in a list, never changes its arrays."""
    if isinstance(arrays, (list, tuple)):
        return any(map(is_immutable, arrays))
    return type(arrays).__module__.partition(".")[0] in _IMMUTABLE
