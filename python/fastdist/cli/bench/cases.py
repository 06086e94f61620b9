"""Message sizes, dtypes, and the cases of a command line."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from fastdist.cli.bench.collectives import COLLECTIVES
from fastdist.cli.bench.models import gradient_shapes

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

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_FACTOR = 4  # from a size of a range to the next
_SIZE = re.compile(r"(\d+)\s*([KMG]?)(?:i?B)?", re.IGNORECASE)


def parse_size(text: str) -> int:
    """Parse a size in bytes: `8`, `64K`, `1M`, `2GiB` (powers of 1024).

    Raises:
        ValueError: The text is not a positive size.
    """
    match = _SIZE.fullmatch(text.strip())
    size = int(match[1]) * _UNITS[match[2].upper()] if match else 0
    if size < 1:
        raise ValueError(f"expected a size in bytes like 8, 64K or 1M, got {text!r}")
    return size


def parse_sizes(text: str) -> tuple[int, ...]:
    """Parse a range `8:256M` or a list `8,1K,64K` of sizes.

    In a range each size is 4 times the previous size; the end is always included.

    Raises:
        ValueError: A size is malformed, or the range is descending.
    """
    if ":" not in text:
        return tuple(parse_size(part) for part in text.split(","))
    first, _, last = text.partition(":")
    size, end = parse_size(first), parse_size(last)
    if end < size:
        raise ValueError(f"expected a range from small to large, got {text!r}")
    sizes = []
    while size < end:
        sizes.append(size)
        size *= _FACTOR
    return (*sizes, end)


def format_size(size_bytes: int) -> str:
    """Return the shortest text that `parse_size` parses as this size."""
    for unit in ("G", "M", "K"):
        if size_bytes and size_bytes % _UNITS[unit] == 0:
            return f"{size_bytes // _UNITS[unit]}{unit}"
    return str(size_bytes)


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
