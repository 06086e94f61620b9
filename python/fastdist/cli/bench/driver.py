"""Interface of an engine for a rank, the table of engines, their arrays, and what drivers share."""

from __future__ import annotations

import importlib
import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from fastdist.cli.bench.cases import DTYPE_BYTES, Case

Array = Any  # a numpy array or a torch tensor
Block = npt.NDArray[Any]
Call = Callable[[], object]

_BUCKET_BYTES = 25 << 20
# What makes each driver, in engine_drivers.py.
_DRIVERS = {
    "fastdist": "FastdistDriver",
    "fastdist_torch": "open_fastdist",
    "gloo": "open_gloo",
    "mpi": "MpiDriver",
    "fastdist_cuda": "open_cuda",
    "torch_nccl": "open_nccl",
}


class UnsupportedCaseError(Exception):
    """The engine does not support the operation, dtype or array."""


@dataclass(frozen=True, slots=True)
class ArrayLibrary:
    """Makes, fills and reads one library's arrays."""

    make: Callable[[Sequence[int], str], Array]  # uninitialized, of a shape and a dtype name
    flat: Callable[[Array], Array]  # a one-dimensional view
    filler: Callable[[Array], Callable[[float], object]]  # the method that sets every element
    write: Callable[[Array, int, Block], None]  # copies a block into a flat array, from an index on
    read: Callable[[Array, int, int], Block]  # part of a flat array; float32 if numpy has no dtype


def _write(flat: Array, start: int, block: Array) -> None:
    flat[start : start + len(block)] = block


def numpy_arrays() -> ArrayLibrary:
    """Return the library of numpy arrays."""

    def make(shape: Sequence[int], dtype: str) -> Array:
        if dtype == "bfloat16":
            raise UnsupportedCaseError("numpy has no bfloat16")
        return np.empty(tuple(shape), dtype)

    return ArrayLibrary(
        make=make,
        flat=lambda array: array.reshape(-1),
        filler=lambda array: array.fill,
        write=_write,
        read=lambda flat, start, stop: flat[start:stop],
    )


def torch_arrays(device: str = "cpu") -> ArrayLibrary:
    """Return the library of torch tensors."""
    torch: Any = importlib.import_module("torch")

    def read(flat: Array, start: int, stop: int) -> Block:
        part = flat[start:stop]
        block: Block = (part.float() if part.dtype == torch.bfloat16 else part).cpu().numpy()
        return block

    return ArrayLibrary(
        make=lambda shape, dtype: torch.empty(shape, dtype=getattr(torch, dtype), device=device),
        flat=lambda array: array.view(-1),
        filler=lambda array: array.fill_,
        write=lambda flat, start, block: _write(flat, start, torch.from_numpy(block)),
        read=read,
    )


class Driver(ABC):
    """One rank's side of an engine.

    Attributes:
        barrier: The engine's own barrier; on GPUs a call that makes their streams meet.
        gpu: `Gpu` on which the calls run, in the order of its stream; None for the CPU.
    """

    rank: int
    world_size: int
    version: str
    barrier: Call
    gpu: Any = None

    @abstractmethod
    def arrays(self, kind: str) -> ArrayLibrary:
        """Return the arrays for this engine in a run where fastdist takes arrays of `kind`."""

    @abstractmethod
    def bind(self, case: Case, passes: Array | None, gets: Array | None) -> Call:
        """Bind arrays to the collective; the returned call does nothing else.

        Raises:
            UnsupportedCaseError: The engine lacks the operation, reduce op or dtype.
        """

    @abstractmethod
    def bind_list(self, case: Case, arrays: Sequence[Array]) -> Call:
        """Bind a list of arrays to an all-reduce in place."""

    @abstractmethod
    def close(self) -> None:
        """Leave the engine. Every rank must call."""

    def ring_neighbors(self) -> tuple[int, int]:
        """Return the ranks to which this rank of a `send_recv` sends, and from which it gets."""
        return (self.rank + 1) % self.world_size, (self.rank - 1) % self.world_size

    def ring_call(
        self,
        send: Callable[[Array, int], object],
        recv: Callable[[Array, int], object],
        passes: Array,
        gets: Array,
    ) -> Call:
        """Return `send_recv` by blocking calls; without a deadlock, as odd ranks receive first."""
        to, source = self.ring_neighbors()
        pair = [partial(send, passes, to), partial(recv, gets, source)]
        first, second = reversed(pair) if self.rank % 2 else pair

        def ring() -> None:
            first()
            second()

        return ring


def open_driver(kind: str) -> Driver:
    """Start a driver of `_DRIVERS` from the launcher's environment. Every rank must call."""
    make: Callable[[], Driver] = pkgutil.resolve_name(
        f"fastdist.cli.bench.engine_drivers:{_DRIVERS[kind]}"
    )
    return make()


def bucketed(
    library: ArrayLibrary,
    copy_all: Callable[[Sequence[Array], Sequence[Array]], object],
    arrays: Sequence[Array],
    dtype: str,
    begin: Callable[[Array], Any],
    overlap: bool = False,
) -> Call:
    """Return a call that reduces a list as DDP does, in buckets of 25 MB; what fills one closes it.

    `copy_all` copies to arrays, from arrays. `begin` reduces a flat array; with `overlap`, it
    returns what to wait for, and buckets are copied while others are reduced.
    """
    groups: list[list[Array]] = [[]]
    for array in map(library.flat, arrays):
        if sum(map(len, groups[-1])) * DTYPE_BYTES[dtype] >= _BUCKET_BYTES:
            groups.append([])
        groups[-1].append(array)
    buckets = []
    for group in groups:
        ends = list(accumulate(map(len, group), initial=0))
        flat = library.make([ends[-1]], dtype)
        buckets.append((flat, [flat[start:end] for start, end in pairwise(ends)], group))

    def reduce() -> None:
        works = []
        for flat, parts, group in buckets:
            copy_all(parts, group)
            works.append(begin(flat))
            if not overlap:
                copy_all(group, parts)
        if overlap:
            for (_, parts, group), work in zip(buckets, works, strict=True):
                work.wait()
                copy_all(group, parts)

    return reduce
