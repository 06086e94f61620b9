"""The cases to measure: collectives, sizes, lists of gradients, dtypes, reduce ops, arrays.

N is the "bytes" column and n the world size. As in nccl-tests, N is the size of the larger of a
rank's two buffers; if that buffer consists of n blocks, "count" is the elements of one block.

Floor traffic: every byte that a rank passes is read once, and every byte that a rank gets is
written once, all in one memory system. The floor is the time of this traffic at the speed of n
ranks that copy at the same time, where a copy counts the bytes read and the bytes written. The
floor does not apply to buffers in the caches, which are faster than memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

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
ROOT = 0

Shape = tuple[int, ...]


def _resnet50() -> list[Shape]:
    """Return the shapes of torchvision's resnet50 (He et al. 2015): bottlenecks with BatchNorm."""
    convolutions = [(64, 3, 7)]  # outputs, inputs, kernel
    inputs = 64
    for blocks, width in ((3, 64), (4, 128), (6, 256), (3, 512)):
        for block in range(blocks):
            convolutions += [(width, inputs, 1), (width, width, 3), (4 * width, width, 1)]
            if block == 0:
                convolutions.append((4 * width, inputs, 1))
            inputs = 4 * width
    shapes: list[Shape] = []
    for outputs, width, kernel in convolutions:
        shapes += [(outputs, width, kernel, kernel), (outputs,), (outputs,)]  # and the norm
    return [*shapes, (1000, inputs), (1000,)]


_NORM: list[Shape] = [(768,), (768,)]
_SQUARE: list[Shape] = [(768, 768), (768,)]  # BERT's query, key, value, output, and pooler
_WIDER: list[Shape] = [(768, 3072), (3072,), (3072, 768), (768,)]

# Gradients of real models, in the order of the model's parameters. They follow from the
# hyperparameters of the architectures, so that neither the models nor their libraries are needed. A
# test compares the numbers of tensors and parameters with the originals.
GRADIENT_SHAPES: dict[str, Sequence[Shape]] = {
    "resnet50": _resnet50(),
    # GPT-2 small (Radford et al. 2019), whose output is the embedding.
    "gpt2": [
        *[(50257, 768), (1024, 768)],
        *12 * [*_NORM, (768, 2304), (2304,), *_SQUARE, *_NORM, *_WIDER],
        *_NORM,
    ],
    # bert-base-uncased (Devlin et al. 2018) with its pooler.
    "bert": [
        *[(30522, 768), (512, 768), (2, 768), *_NORM],
        *12 * [*4 * _SQUARE, *_NORM, (3072, 768), (3072,), (768, 3072), (768,), *_NORM],
        *_SQUARE,
    ],
}


@dataclass(frozen=True, slots=True)
class Collective:
    """The properties of a collective; functions are of the world size."""

    bus_factor: Callable[[int], float]  # busbw / algbw, as in nccl-tests
    floor_buffers: Callable[[int], int]  # floor traffic in units of N
    passes: str = "count"  # the buffer of a rank, as in `buffer_elements`
    gets: str = ""  # the result replaces what is passed
    reduces: bool = False  # takes a reduce op


def _others(world_size: int) -> float:
    return (world_size - 1) / world_size


# By method of `Communicator`; `send_recv` sends to the next rank and receives from the previous.
COLLECTIVES = {
    "all_reduce": Collective(lambda n: 2 * _others(n), lambda n: 2 * n, reduces=True),
    "reduce": Collective(lambda n: 1, lambda n: n + 1, reduces=True),
    "broadcast": Collective(lambda n: 1, lambda n: n),
    "all_gather": Collective(_others, lambda n: n + 1, "count", "blocks"),
    "gather": Collective(_others, lambda n: 2, "count", "blocks on the root"),
    "scatter": Collective(_others, lambda n: 2, "blocks on the root", "count"),
    "reduce_scatter": Collective(_others, lambda n: n + 1, "blocks", "count", reduces=True),
    "all_to_all": Collective(_others, lambda n: 2 * n, "blocks", "blocks"),
    "send_recv": Collective(lambda n: 1, lambda n: 2 * n, "count", "count"),
    "barrier": Collective(lambda n: 1, lambda n: 0, passes=""),
}


def buffer_elements(name: str, count: int, rank: int, world_size: int) -> tuple[int, int]:
    """Return the elements that a rank passes and gets; 0 means no such buffer."""
    blocks = count * world_size
    at_root = blocks if rank == ROOT else 0
    elements = {"": 0, "count": count, "blocks": blocks, "blocks on the root": at_root}
    collective = COLLECTIVES[name]
    return elements[collective.passes], elements[collective.gets]


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
    def title(self) -> str:
        """Collective and size for readers: `all_reduce 64 KiB`."""
        if self.model:
            return f"{self.collective} of {self.model}'s gradients"
        if not self.bytes:
            return self.collective
        size = format_size(self.bytes)
        unit = "B" if size.isdigit() else f"{size[-1]}iB"
        return f"{self.collective} {size.rstrip('KMG')} {unit}"


def array_cases(
    collective: str,
    sizes_bytes: Sequence[int],
    world_size: int,
    dtype: str = "float32",
    redop: str = "sum",
    array: str = "numpy",
) -> tuple[Case, ...]:
    """Return a case of one array per distinct size, in order; one case for a barrier.

    An array has about as many bytes, at least one element per block.
    """
    redop = redop if COLLECTIVES[collective].reduces else ""
    if collective == "barrier":
        return (Case(collective, 0, 0, dtype, redop, array),)
    block_bytes = DTYPE_BYTES[dtype] * max(buffer_elements(collective, 1, ROOT, world_size))
    counts = dict.fromkeys(max(1, size // block_bytes) for size in sizes_bytes)
    return tuple(Case(collective, n * block_bytes, n, dtype, redop, array) for n in counts)


def list_case(model: str, dtype: str, redop: str, array: str) -> Case:
    """Return a case of one fused all-reduce of a model's gradients."""
    count = sum(math.prod(shape) for shape in GRADIENT_SHAPES[model])
    return Case("all_reduce", count * DTYPE_BYTES[dtype], count, dtype, redop, array, model)
