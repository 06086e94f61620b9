"""New arrays of the caller's own library: what collectives return when no `out=` is given."""

from __future__ import annotations

from typing import Any

import numpy as np


def new_like(array: Any, shape: tuple[int, ...]) -> Any:
    """An uninitialised array of `shape` with the library and dtype of `array`."""
    if isinstance(array, np.ndarray):
        return np.empty(shape, array.dtype)
    new_empty = getattr(array, "new_empty", None)
    if new_empty is not None:  # torch
        return new_empty(shape, requires_grad=False)
    if hasattr(array, "__dlpack__"):
        return np.empty(shape, np.from_dlpack(array).dtype)
    return np.empty(shape, np.asarray(memoryview(array)).dtype)


def shape_of(array: Any) -> tuple[int, ...]:
    """The shape of any array that collectives take."""
    shape = getattr(array, "shape", None)
    if shape is not None:
        return tuple(shape)
    try:
        return np.asarray(memoryview(array)).shape
    except TypeError:
        raise TypeError(
            f"array must be a numpy, torch or other DLPack array, got {type(array).__name__}"
        ) from None


def view_bytes(
    data: np.ndarray[Any, np.dtype[np.uint8]], shape: tuple[int, ...], dtype: Any
) -> Any:
    """`data` seen as an array of `shape`: torch's where `dtype` is torch's, else numpy's."""
    if type(dtype).__module__ == "torch":
        import torch

        return torch.from_numpy(data).view(dtype).view(shape)
    return data.view(numpy_dtype(dtype)).reshape(shape)


def item_bytes(dtype: Any) -> int:
    """Bytes of one element of a numpy or torch dtype."""
    if type(dtype).__module__ == "torch":
        return int(dtype.itemsize)
    return numpy_dtype(dtype).itemsize


def numpy_dtype(dtype: Any) -> np.dtype[Any]:
    """A numpy dtype; the names that numpy lacks (bfloat16, float8_…) come from ml_dtypes."""
    try:
        made: np.dtype[Any] = np.dtype(dtype)
        return made
    except TypeError:
        if not isinstance(dtype, str):
            raise
    try:
        import ml_dtypes
    except ImportError:
        raise ImportError(
            f"dtype {dtype!r} in numpy needs ml_dtypes: pip install ml_dtypes"
        ) from None
    if not hasattr(ml_dtypes, dtype):
        raise TypeError(f"unknown dtype {dtype!r}")
    made = np.dtype(getattr(ml_dtypes, dtype))
    return made
