"""Measures the kernels that copy a list's arrays into and out of buckets, on one GPU.

fastdist's kernels take turns with two ways of torch: `flatten_dense_tensors` and
`unflatten_dense_tensors` with a copy per tensor; and `_foreach_copy_` between the tensors and views
of one flat tensor. Speeds are bytes read and written per time, also as a percentage of the speed of
a plain copy of a large buffer in the same rounds. Before each call the arrays are written, and then
enough other memory to remove them from the GPU's cache.
"""

from __future__ import annotations

import importlib
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import fastdist._core as _core
from fastdist.cli.bench.arrays import Array
from fastdist.cli.bench.bound_case import with_phases
from fastdist.cli.bench.cases import DTYPE_BYTES
from fastdist.cli.bench.gpu import Call, Gpu
from fastdist.cli.bench.gpu_call import Batches, Lead
from fastdist.cli.bench.models import gradient_shapes
from fastdist.cli.bench.results import p99_ns
from fastdist.cli.bench.verify import count_wrong, patterned_inputs, write_input

WIRE_DTYPES = {"fp16": "float16", "bf16": "bfloat16"}
DIRECTIONS = ("pack", "unpack")

CALLS_PER_TURN = 4
_LEAST_COPY_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class PackCase:
    """A list of gradients, and the format that packing casts it to; empty: no cast."""

    model: str
    dtype: str
    compress: str = ""

    @property
    def label(self) -> str:
        """Model, dtype and format, for messages."""
        cast = f" as {self.compress}" if self.compress else ""
        return f"{self.model} {self.dtype}{cast}"

    @property
    def elements(self) -> int:
        """Elements of all arrays."""
        return sum(map(math.prod, gradient_shapes(self.model)))

    @property
    def traffic_bytes(self) -> int:
        """Bytes that packing or unpacking reads and writes."""
        wire = WIRE_DTYPES.get(self.compress, self.dtype)
        return self.elements * (DTYPE_BYTES[self.dtype] + DTYPE_BYTES[wire])


@dataclass(slots=True)
class Way:
    """One implementation of one case in one direction, and its times."""

    name: str
    direction: str
    call: Call
    times_ns: list[int] = field(default_factory=list)
    wrong: int = 0


@dataclass(frozen=True, slots=True)
class PackRow:
    """Figures of one way.

    Attributes:
        case: The case.
        way: `fastdist`, or a way of torch.
        direction: One of `DIRECTIONS`.
        p50_us: Median time on the GPU.
        p99_us: 99th percentile of the times.
        gb_per_s: Bytes read and written per median time.
        copy_percent: Speed as a percentage of a plain copy's speed.
        times_as_fast: Time of this way divided by fastdist's time.
        iterations: Number of timed calls.
        wrong: Elements changed by packing and unpacking.
    """

    case: PackCase
    way: str
    direction: str
    p50_us: float
    p99_us: float
    gb_per_s: float
    copy_percent: float
    times_as_fast: float
    iterations: int
    wrong: int


class PackBench:
    """Times packing and unpacking on one GPU.

    Args:
        gpu: The GPU.
        torch_ways: Also measure torch's ways; the arrays must be torch tensors.
        bucket_bytes: Size of the buckets.
        rounds: Number of turns of each way, with four calls each.
    """

    def __init__(self, gpu: Gpu, torch_ways: bool, bucket_bytes: int, rounds: int) -> None:
        self._gpu = gpu
        self._torch_ways = torch_ways
        self._bucket_bytes = bucket_bytes
        self._rounds = rounds
        self._batches = Batches(gpu, Lead(gpu), CALLS_PER_TURN)
        self._flush = gpu.copy_call(_LEAST_COPY_BYTES)
        self.copy_gb_per_s = 0.0

    def measure(self, case: PackCase) -> list[PackRow]:
        """Measures every way in both directions, in turns."""
        make, stream = self._gpu.arrays.make, self._gpu.stream
        arrays = [make(shape, case.dtype) for shape in gradient_shapes(case.model)]
        packed = _core.PackedList(
            arrays, self._gpu.device, case.compress or None, self._bucket_bytes
        )
        ways = [
            Way("fastdist", "pack", lambda: packed.pack(stream)),
            Way("fastdist", "unpack", lambda: packed.unpack(stream)),
        ]
        if self._torch_ways:
            ways += torch_ways(arrays, case)
        copied = max(_LEAST_COPY_BYTES, case.elements * DTYPE_BYTES[case.dtype])
        copy = Way("copy", "", self._gpu.copy_call(copied))
        fillers = [self._gpu.arrays.filler(array) for array in arrays]

        def fill() -> None:
            for filler in fillers:
                filler(1)
            self._flush()  # removes the data from the cache, for all ways and the copy

        for number in range(self._rounds + 1):
            for way in (copy, *ways):
                times_ns = self._batches.work_ns([fill] * CALLS_PER_TURN, way.call)
                if number:  # the first round warms up
                    way.times_ns += times_ns
        for into, out in zip(ways[::2], ways[1::2], strict=True):
            into.wrong = out.wrong = self._changed(arrays, case, into.call, out.call)
        speed = 2 * copied / statistics.median(copy.times_ns)
        self.copy_gb_per_s = max(self.copy_gb_per_s, speed)
        return [pack_row(case, way, ways[i % 2], speed) for i, way in enumerate(ways)]

    def _changed(self, arrays: Sequence[Array], case: PackCase, into: Call, out: Call) -> int:
        """Counts elements that change when the list is packed, overwritten and unpacked."""
        library = self._gpu.arrays
        inputs = patterned_inputs(1, case.dtype, "")
        phased = list(with_phases(arrays))
        for array, phase in phased:
            write_input(library, array, inputs, 0, phase)
        into()
        for array in arrays:
            library.filler(array)(101)
        out()
        return sum(
            count_wrong(library, array, "broadcast", 0, inputs, phase) for array, phase in phased
        )


def torch_ways(arrays: Sequence[Array], case: PackCase) -> list[Way]:
    """Returns torch's ways to copy tensors of any device into a flat tensor and back."""
    torch: Any = importlib.import_module("torch")
    flattening: Any = importlib.import_module("torch._utils")
    wire = getattr(torch, WIRE_DTYPES.get(case.compress, case.dtype))
    sizes = [array.numel() for array in arrays]
    flat = torch.empty(sum(sizes), dtype=wire, device=arrays[0].device)
    parts = list(flat.split(sizes))
    lines = [array.view(-1) for array in arrays]
    held = [flat]

    def flatten() -> None:
        held[0] = flattening._flatten_dense_tensors(arrays).to(wire)

    def unflatten() -> None:
        pieces = flattening._unflatten_dense_tensors(held[0], arrays)
        for array, piece in zip(arrays, pieces, strict=True):
            array.copy_(piece)

    return [
        Way("torch: flatten", "pack", flatten),
        Way("torch: flatten", "unpack", unflatten),
        Way("torch: foreach", "pack", lambda: torch._foreach_copy_(parts, lines)),
        Way("torch: foreach", "unpack", lambda: torch._foreach_copy_(lines, parts)),
    ]


def pack_row(case: PackCase, way: Way, ours: Way, copy_gb_per_s: float) -> PackRow:
    """Computes the figures of a way from its times, fastdist's times and a copy's speed."""
    p50_ns = statistics.median(way.times_ns)
    speed = case.traffic_bytes / p50_ns
    return PackRow(
        case=case,
        way=way.name,
        direction=way.direction,
        p50_us=p50_ns / 1e3,
        p99_us=p99_ns(way.times_ns) / 1e3,
        gb_per_s=speed,
        copy_percent=100 * speed / copy_gb_per_s,
        times_as_fast=p50_ns / statistics.median(ours.times_ns),
        iterations=len(way.times_ns),
        wrong=way.wrong,
    )
