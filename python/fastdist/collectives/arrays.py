"""New arrays of the caller's own library, for collectives without `out=`, and their dtypes."""

from __future__ import annotations

import contextlib
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from math import prod
from typing import Any

import numpy as np

from fastdist.collectives.arguments import to_integers
from fastdist.collectives.hints import not_an_array
from fastdist.collectives.types import Array, Arrays
from fastdist.recorder.signatures import DTYPES

NOT_IN_NUMPY = frozenset({"bfloat16", "float8_e4m3fn", "float8_e5m2"})


def new_like(array: Array, shape: tuple[int, ...]) -> Array:
    """Make an uninitialised array of `shape` with the library and dtype of `array`."""
    if isinstance(array, np.ndarray):
        return np.empty(shape, array.dtype)
    new_empty = getattr(array, "new_empty", None)
    if new_empty is not None:  # torch
        return new_empty(shape, requires_grad=False)
    if type(array).__module__.partition(".")[0] == "cupy":
        with array.device:
            return sys.modules["cupy"].empty(shape, array.dtype)
    if hasattr(array, "__cuda_array_interface__"):
        raise TypeError(f"out= must be given: fastdist cannot make a new {type(array).__name__}")
    if isinstance(getattr(array, "dtype", None), np.dtype):  # jax
        return np.empty(shape, array.dtype)
    if hasattr(array, "__dlpack__"):
        return np.empty(shape, _of_dlpack(array).dtype)
    return np.empty(shape, np.asarray(memoryview(array)).dtype)


def empty_like(arrays: Arrays) -> Arrays:
    """Make uninitialised arrays of the shapes of `arrays`."""
    if isinstance(arrays, (list, tuple)):
        return [empty_like(array) for array in arrays]
    return new_like(arrays, shape_of(arrays))


def rows_like(arrays: Arrays, rows: int) -> Arrays:
    """Make uninitialised arrays like `arrays` with another number of rows."""
    return for_each(arrays, lambda array: new_like(array, (rows, *shape_of(array)[1:])))


def joined_like(arrays: Arrays, size: int) -> Arrays:
    """Make uninitialised arrays for the joined arrays of `size` ranks."""
    if isinstance(arrays, (list, tuple)):
        return [joined_like(array, size) for array in arrays]
    shape = shape_of(arrays) or (1,)
    return new_like(arrays, (size * shape[0], *shape[1:]))


def part_like(arrays: Arrays, size: int) -> Arrays:
    """Make uninitialised arrays for one of `size` equal parts of each array."""
    if isinstance(arrays, (list, tuple)):
        return [part_like(array, size) for array in arrays]
    shape = shape_of(arrays)
    return new_like(arrays, (shape[0] // size, *shape[1:]))


def check_parts(arrays: Arrays, size: int) -> None:
    """Check that each array can be cut along axis 0 into `size` equal parts."""
    for array in as_list(arrays):
        shape = shape_of(array)
        if not shape or shape[0] % size != 0:
            raise ValueError(
                f"array must have a multiple of {size} rows, one part for each rank, "
                f"got shape {shape}"
            )


def require_writable(out: Arrays) -> None:
    """Check that results can be written, for calls that would find out only amid other calls."""
    for array in as_list(out):
        if getattr(getattr(array, "flags", None), "writeable", True) is False:
            raise ValueError("out must be writable")


def as_list(arrays: Arrays) -> Sequence[Array]:
    """Return one array, or a list of them, as a list."""
    return arrays if isinstance(arrays, (list, tuple)) else [arrays]


def for_each(arrays: Arrays, call: Callable[[Array], Any]) -> Any:
    """Call for one array, or for each array of a list."""
    return [call(a) for a in arrays] if isinstance(arrays, (list, tuple)) else call(arrays)


def shape_of(array: Array) -> tuple[int, ...]:
    """Return the shape of any array that collectives take."""
    shape = getattr(array, "shape", None)
    if shape is not None:
        return tuple(shape)
    try:
        if hasattr(array, "__dlpack__"):  # pyarrow
            return tuple(_of_dlpack(array).shape)
        return np.asarray(memoryview(array)).shape
    except TypeError:
        raise TypeError(not_an_array("array", array)) from None


def dtype_name(array: Array) -> str:
    """Return the name of an array's dtype, the same in every library; "" if it is unknown."""
    dtype = getattr(array, "dtype", None)
    if dtype is None:
        with contextlib.suppress(TypeError):  # of pyarrow
            dtype = np.asarray(memoryview(array)).dtype
    return str(dtype or "").removeprefix("torch.")


def _of_dlpack(array: Any) -> np.ndarray[Any, Any]:
    """View an array of a library without shapes, such as pyarrow."""
    with warnings.catch_warnings():
        # numpy asks for an unversioned capsule, of which pyarrow warns, once the other is refused.
        warnings.simplefilter("ignore", DeprecationWarning)
        return np.from_dlpack(array)


def view_bytes(
    data: np.ndarray[Any, np.dtype[np.uint8]], shape: tuple[int, ...], dtype: Any
) -> Any:
    """View `data` as an array of `shape`, of the library of `dtype`."""
    if isinstance(dtype, np.dtype):
        return data.view(dtype).reshape(shape)
    import torch

    return torch.from_numpy(data).view(dtype).view(shape)


def view_gpu_bytes(memory: Any, nbytes: int, shape: tuple[int, ...], dtype: Any) -> Any:
    """View the first bytes of GPU memory as a torch tensor, or a cupy array for a numpy dtype."""
    if not isinstance(dtype, np.dtype):
        import torch

        data = torch.as_tensor(memory, device=f"cuda:{memory.device}")
        return data[:nbytes].view(dtype).view(shape)
    try:
        import cupy  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        raise ImportError(
            "an array on a GPU with a numpy dtype needs cupy: pip install cupy-cuda13x (or "
            "cupy-cuda12x); or pass a torch dtype"
        ) from None
    with cupy.cuda.Device(memory.device):
        return cupy.asarray(memory)[:nbytes].view(dtype).reshape(shape)


def to_gpu(device: Any) -> int:
    """Return the number of a GPU given as "cuda", "cuda:1", a torch device or a number."""
    if isinstance(device, int) and not isinstance(device, bool) and device >= 0:
        return device
    found = re.fullmatch(r"cuda(?::(\d+))?", str(device))
    if found is None:
        raise ValueError(f'device must be a GPU such as "cuda:0", got {device!r}')
    if found[1] is not None:
        return int(found[1])
    torch = sys.modules.get("torch")
    return int(torch.cuda.current_device()) if torch is not None else 0


def to_layout(shape: int | Sequence[int], dtype: Any) -> tuple[tuple[int, ...], Any, int]:
    """Check the shape and dtype of a new array; return both and its size in bytes."""
    shape = tuple(to_integers(shape if isinstance(shape, Iterable) else [shape], "shape"))
    dtype = to_dtype(dtype)
    if any(length < 0 for length in shape):
        raise ValueError(f"shape must not be negative, got {shape}")
    nbytes = prod(shape) * dtype.itemsize
    if nbytes >= 1 << 62:
        raise MemoryError(f"no machine has memory for an array of shape {shape}")
    return shape, dtype, nbytes


def to_dtype(dtype: Any) -> Any:
    """Convert to a dtype that collectives take: a torch dtype unchanged, others to numpy.

    Names that numpy lacks (bfloat16, float8_…) come from ml_dtypes.
    """
    made: Any = None
    if type(dtype).__module__ == "torch":
        if str(dtype).removeprefix("torch.") in DTYPES:
            return dtype
    elif isinstance(dtype, str) and dtype in NOT_IN_NUMPY:
        try:
            import ml_dtypes
        except ImportError:
            raise ImportError(
                f"dtype {dtype!r} in numpy needs ml_dtypes: pip install ml_dtypes"
            ) from None
        return np.dtype(getattr(ml_dtypes, dtype))
    else:
        with contextlib.suppress(TypeError):
            made = np.dtype(dtype)
        if made is not None and made.name in DTYPES and made.isnative:
            return made
    raise TypeError(
        f"dtype must be one of {', '.join(DTYPES)}, in native byte order; got {dtype!r}"
    )
