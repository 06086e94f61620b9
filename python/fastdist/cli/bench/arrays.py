"""The arrays that a rank passes: numpy's or torch's, behind one interface."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = Any  # a numpy array or a torch tensor


class UnsupportedCaseError(Exception):
    """The engine does not support the operation, dtype or array."""


@dataclass(frozen=True, slots=True)
class ArrayLibrary:
    """Makes, fills and reads one library's arrays.

    Attributes:
        make: Function that returns an uninitialized array of a shape and a dtype name.
        flat: Function that returns a one-dimensional view of an array.
        filler: Function that returns an array's bound method to set every element to its argument.
        write: Function that copies a numpy block into a part of a flat array.
        read: Function from a part of a flat array to numpy; float32 if numpy lacks the dtype.
        copy_all: Function that copies the arrays of the second list into those of the first list.
    """

    make: Callable[[Sequence[int], str], Array]
    flat: Callable[[Array], Array]
    filler: Callable[[Array], Callable[[float], object]]
    write: Callable[[Array, int, npt.NDArray[Any]], None]
    read: Callable[[Array, int, int], npt.NDArray[Any]]
    copy_all: Callable[[Sequence[Array], Sequence[Array]], object]


def _numpy_empty(shape: Sequence[int], dtype: str) -> Array:
    if dtype == "bfloat16":
        raise UnsupportedCaseError("numpy has no bfloat16")
    return np.empty(tuple(shape), dtype)


def _numpy_write(flat: Array, start: int, block: npt.NDArray[Any]) -> None:
    flat[start : start + block.size] = block


def _copy_each(to: Sequence[Array], source: Sequence[Array]) -> None:
    for target, array in zip(to, source, strict=True):
        target[...] = array


def numpy_arrays(make: Callable[[Sequence[int], str], Array] = _numpy_empty) -> ArrayLibrary:
    """Return the library of numpy arrays, from `np.empty` or an allocator like `comm.empty`."""
    return ArrayLibrary(
        make=make,
        flat=lambda array: array.reshape(-1),
        filler=lambda array: array.fill,
        write=_numpy_write,
        read=lambda flat, start, stop: flat[start:stop],
        copy_all=_copy_each,
    )


def torch_arrays(
    device: str = "cpu", make: Callable[[Sequence[int], str], Array] | None = None
) -> ArrayLibrary:
    """Return the library of torch tensors, from `torch.empty` or an allocator like `comm.empty`."""
    torch: Any = importlib.import_module("torch")

    def empty(shape: Sequence[int], dtype: str) -> Array:
        return torch.empty(tuple(shape), dtype=getattr(torch, dtype), device=device)

    def write(flat: Array, start: int, block: npt.NDArray[Any]) -> None:
        flat[start : start + block.size] = torch.from_numpy(block)

    def read(flat: Array, start: int, stop: int) -> npt.NDArray[Any]:
        part = flat[start:stop]
        result: npt.NDArray[Any] = (
            (part.float() if part.dtype == torch.bfloat16 else part).cpu().numpy()
        )
        return result

    return ArrayLibrary(
        make=make or empty,
        flat=lambda array: array.view(-1),
        filler=lambda array: array.fill_,
        write=write,
        read=read,
        copy_all=torch._foreach_copy_,
    )
