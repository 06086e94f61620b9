"""Expected results of collectives, computed with numpy in one process."""

from __future__ import annotations

from functools import cache
from typing import Any

import ml_dtypes
import numpy as np

Array = np.ndarray[Any, Any]

INTEGERS = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]
SMALL_FLOATS = ["float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"]
FLOATS = [*SMALL_FLOATS, "float32", "float64"]
COMPLEX = ["complex64", "complex128"]
DTYPES = ["bool", *INTEGERS, *FLOATS, *COMPLEX]
REDUCE_OPS = ["sum", "mean", "prod", "min", "max", "and", "or", "xor"]


def numpy_dtype(name: str) -> np.dtype[Any]:
    return np.dtype(getattr(ml_dtypes, name, name))


def is_defined(op: str, dtype: str) -> bool:
    if op in ("sum", "prod"):
        return True
    if op == "mean":
        return dtype in FLOATS + COMPLEX
    if op in ("min", "max"):
        return dtype not in COMPLEX
    return dtype in [*INTEGERS, "bool"]


@cache
def _pool(dtype: str, size: int) -> Array:
    """Random values from which samples are cut; making them each time would slow the tests."""
    pool = _random(dtype, size)
    pool.setflags(write=False)
    return pool


def _random(dtype: str, size: int) -> Array:
    rng = np.random.default_rng(size)
    kind = numpy_dtype(dtype)
    if dtype == "bool":
        return rng.integers(0, 2, size).astype(bool)
    if dtype in INTEGERS:
        limits = np.iinfo(kind)
        return rng.integers(limits.min, limits.max, size, kind, endpoint=True)
    if dtype in COMPLEX:
        return (rng.standard_normal(size) + 1j * rng.standard_normal(size)).astype(kind)
    return rng.standard_normal(size, np.float64 if dtype == "float64" else np.float32).astype(kind)


def sample(dtype: str, size: int, seed: int, rank: int) -> Array:
    """Return the input of a rank: different on every rank, with signs and, for ints, overflow.

    The array is a part of the pool and read-only.
    """
    start = (seed * 31 + rank) * 257
    length = 1 << (start + size).bit_length()
    return _pool(dtype, length)[start : start + size]


def _product(a: Array, b: Array) -> Array:
    """Multiply; complex numbers by parts, which numpy may fuse."""
    if a.dtype.kind != "c":
        return np.multiply(a, b)
    parts = a.real * b.real - a.imag * b.imag, a.real * b.imag + a.imag * b.real
    return np.stack(parts, -1).view(a.dtype)[..., 0]


def reduced(inputs: list[Array], op: str) -> Array:
    """Reduce by the binary tree over ranks; small floats in float32, rounded once at the end."""
    dtype = inputs[0].dtype
    name = dtype.name
    if name == "bool":
        pick = {"sum": np.logical_or, "max": np.logical_or, "or": np.logical_or}
        function = pick.get(op, np.logical_xor if op == "xor" else np.logical_and)
    else:
        function = {
            "sum": np.add,
            "mean": np.add,
            "prod": _product,
            "min": np.minimum,
            "max": np.maximum,
            "and": np.bitwise_and,
            "or": np.bitwise_or,
            "xor": np.bitwise_xor,
        }[op]
    wide = [x.astype(np.float32) if name in SMALL_FLOATS else x for x in inputs]
    with np.errstate(all="ignore"):
        while len(wide) > 1:
            pairs = [function(*wide[i : i + 2]) for i in range(0, len(wide) - 1, 2)]
            wide = pairs + wide[len(wide) - len(wide) % 2 :]
        result = wide[0].copy()
        if op == "mean":
            # By parts: numpy divides complex numbers by a rounded reciprocal.
            parts = result.view(result.real.dtype)
            result = (parts / np.array(len(inputs), parts.dtype)).view(result.dtype)
        return result.astype(dtype)


def same_bits(a: Array, b: Array) -> bool:
    """Return True if arrays are equal bit by bit; any NaN equals any NaN."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if a.dtype.kind == "c":
        return same_bits(a.view(a.real.dtype), b.view(b.real.dtype))
    raw = f"u{a.itemsize}"
    same = a.view(raw) == b.view(raw)
    if same.all():
        return True
    nans = np.isnan(a.astype(np.float64)) & np.isnan(b.astype(np.float64))
    return bool((same | nans).all())
