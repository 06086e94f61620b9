"""The arrays that a rank passes: numpy's or torch's, behind one interface."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = Any  # a numpy array or a torch tensor
Block = npt.NDArray[Any]
Make = Callable[[Sequence[int], str], Array]


class UnsupportedCaseError(Exception):
    """The engine does not support the operation, dtype or array."""


@dataclass(frozen=True, slots=True)
class ArrayLibrary:
    """Makes, fills and reads one library's arrays."""

    make: Make  # an uninitialized array of a shape and a dtype name
    flat: Callable[[Array], Array]  # a one-dimensional view
    filler: Callable[[Array], Callable[[float], object]]  # the method that sets every element
    write: Callable[[Array, int, Block], None]  # copies a block into a flat array, from an index on
    read: Callable[[Array, int, int], Block]  # part of a flat array; float32 if numpy has no dtype


def _numpy_empty(shape: Sequence[int], dtype: str) -> Array:
    if dtype == "bfloat16":
        raise UnsupportedCaseError("numpy has no bfloat16")
    return np.empty(tuple(shape), dtype)


def _write(flat: Array, start: int, block: Array) -> None:
    flat[start : start + len(block)] = block


def numpy_arrays(make: Make = _numpy_empty) -> ArrayLibrary:
    """Return the library of numpy arrays, from `np.empty` or an allocator like `comm.empty`."""
    return ArrayLibrary(
        make=make,
        flat=lambda array: array.reshape(-1),
        filler=lambda array: array.fill,
        write=_write,
        read=lambda flat, start, stop: flat[start:stop],
    )


def torch_arrays(device: str = "cpu", make: Make | None = None) -> ArrayLibrary:
    """Return the library of torch tensors, from `torch.empty` or an allocator like `comm.empty`."""
    torch: Any = importlib.import_module("torch")

    def empty(shape: Sequence[int], dtype: str) -> Array:
        return torch.empty(tuple(shape), dtype=getattr(torch, dtype), device=device)

    def read(flat: Array, start: int, stop: int) -> Block:
        part = flat[start:stop]
        block: Block = (part.float() if part.dtype == torch.bfloat16 else part).cpu().numpy()
        return block

    return ArrayLibrary(
        make=make or empty,
        flat=lambda array: array.view(-1),
        filler=lambda array: array.fill_,
        write=lambda flat, start, block: _write(flat, start, torch.from_numpy(block)),
        read=read,
    )
