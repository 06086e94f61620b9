"""The arrays that a rank passes: what a measurement needs of numpy and of torch."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = Any  # a numpy array or a torch tensor


class UnsupportedCaseError(Exception):
    """This engine has no such operation, dtype or array."""


@dataclass(frozen=True, slots=True)
class ArrayLibrary:
    """Makes, fills and reads one library's arrays.

    Attributes:
        make: (shape, dtype name) to a new array with undefined contents.
        flat: The array's own memory as one dimension.
        filler: The bound method that sets every element to its argument.
        write: Copies a numpy block into a flat array's part.
        read: A flat array's part as numpy, float32 where numpy lacks the dtype.
    """

    make: Callable[[Sequence[int], str], Array]
    flat: Callable[[Array], Array]
    filler: Callable[[Array], Callable[[float], object]]
    write: Callable[[Array, int, npt.NDArray[Any]], None]
    read: Callable[[Array, int, int], npt.NDArray[Any]]


def _numpy_empty(shape: Sequence[int], dtype: str) -> Array:
    if dtype == "bfloat16":
        raise UnsupportedCaseError("numpy has no bfloat16")
    return np.empty(tuple(shape), dtype)


def _numpy_write(flat: Array, start: int, block: npt.NDArray[Any]) -> None:
    flat[start : start + block.size] = block


def numpy_arrays(make: Callable[[Sequence[int], str], Array] = _numpy_empty) -> ArrayLibrary:
    """numpy arrays, or what another allocator makes of them (`comm.empty`)."""
    return ArrayLibrary(
        make=make,
        flat=lambda array: array.reshape(-1),
        filler=lambda array: array.fill,
        write=_numpy_write,
        read=lambda flat, start, stop: flat[start:stop],
    )


def torch_arrays() -> ArrayLibrary:
    """torch tensors on the CPU."""
    torch: Any = importlib.import_module("torch")

    def write(flat: Array, start: int, block: npt.NDArray[Any]) -> None:
        flat[start : start + block.size] = torch.from_numpy(block)

    def read(flat: Array, start: int, stop: int) -> npt.NDArray[Any]:
        part = flat[start:stop]
        result: npt.NDArray[Any] = (part.float() if part.dtype == torch.bfloat16 else part).numpy()
        return result

    return ArrayLibrary(
        make=lambda shape, dtype: torch.empty(tuple(shape), dtype=getattr(torch, dtype)),
        flat=lambda array: array.view(-1),
        filler=lambda array: array.fill_,
        write=write,
        read=read,
    )
