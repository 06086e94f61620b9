"""The cases of a command line, and their dtypes, reduce ops and arrays."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fastdist.cli.bench.collectives import COLLECTIVES
from fastdist.cli.bench.models import gradient_shapes
from fastdist.cli.sizes import format_size

DTYPE_BYTES = {
    "float32": 4,
    "float64": 8,
    "float16": 2,
    "bfloat16": 2,
    "int8": 1,
    "uint8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
}
REDUCE_OPS = ("sum", "mean", "prod", "min", "max")
# The kinds of arrays of each device; the first is the default.
DEVICE_ARRAYS = {"cpu": ("numpy", "torch", "empty"), "cuda": ("torch", "empty")}


@dataclass(frozen=True, slots=True)
class Case:
    """One line of the table."""

    collective: str  # a key of `COLLECTIVES`
    bytes: int  # size of the larger of a rank's two buffers; total size of a list
    count: int  # elements of that buffer, or of one rank's block of it
    dtype: str  # a key of `DTYPE_BYTES`
    redop: str  # reduce op; empty for collectives without one
    array: str  # arrays for fastdist's calls: `numpy`, `torch`, or `empty` (`comm.empty`)
    model: str = ""  # model whose gradients are the list; empty for one array

    @property
    def label(self) -> str:
        """The size or the model, for messages."""
        return self.model or format_size(self.bytes)

    @property
    def title(self) -> str:
        """Collective and size for readers: `all_reduce 64 KiB`."""
        if self.model:
            return f"{self.collective} of {self.model}'s gradients"
        if not self.bytes:
            return self.collective
        size = format_size(self.bytes)
        unit = "B" if size.isdigit() else f"{size[-1]}iB"
        return f"{self.collective} {size.rstrip('KMG')} {unit}"


def array_case(
    collective: str, size_bytes: int, world_size: int, dtype: str, redop: str, array: str
) -> Case:
    """Return a case of one array of about `size_bytes`, at least one element per block."""
    spec = COLLECTIVES[collective]
    redop = redop if spec.reduces else ""
    if collective == "barrier":
        return Case(collective, 0, 0, dtype, redop, array)
    item_bytes = DTYPE_BYTES[dtype]
    blocks = world_size if spec.blocks else 1
    count = max(1, size_bytes // item_bytes // blocks)
    return Case(collective, count * blocks * item_bytes, count, dtype, redop, array)


def list_case(model: str, dtype: str, redop: str, array: str) -> Case:
    """Return a case of one fused all-reduce of a model's gradients."""
    count = sum(math.prod(shape) for shape in gradient_shapes(model))
    return Case("all_reduce", count * DTYPE_BYTES[dtype], count, dtype, redop, array, model)


def array_cases(
    collective: str,
    sizes_bytes: Sequence[int],
    world_size: int,
    dtype: str = "float32",
    redop: str = "sum",
    array: str = "numpy",
) -> tuple[Case, ...]:
    """Return one case per distinct size, in the given order; one case for a barrier."""
    cases = (array_case(collective, size, world_size, dtype, redop, array) for size in sizes_bytes)
    return tuple(dict.fromkeys(cases))
