"""Interface of an engine for a rank, the table of engines, and what drivers share."""

from __future__ import annotations

import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple

from fastdist.cli.bench.arrays import Array, ArrayLibrary
from fastdist.cli.bench.cases import DTYPE_BYTES, Case
from fastdist.cli.bench.gpu import Gpu

Call = Callable[[], object]
Message = dict[str, Any]  # between the bench and its ranks

_BUCKET_BYTES = 25 << 20
_TORCH = ("25 MB buckets", "one by one", "coalesced")
# The class of each driver, and its ways to reduce a list of gradients; ratios are made with the
# first way.
_DRIVERS = {
    "fastdist": ("fastdist_driver:FastdistDriver", ("list", "one array")),
    "fastdist_torch": ("torch_driver:FastdistTorchDriver", _TORCH),
    "gloo": ("torch_driver:GlooDriver", _TORCH),
    "mlx": ("mlx_driver:MlxDriver", ("concatenated",)),
    "deepspeed": ("torch_driver:DeepSpeedDriver", ("one by one",)),
    "mpi": ("mpi_driver:MpiDriver", ("25 MB buckets",)),
    "fastdist_cuda": ("fastdist_driver:FastdistCudaDriver", ("list", "list in bf16", "one array")),
    "torch_nccl": ("torch_driver:TorchNcclDriver", _TORCH),
}
LIST_VARIANTS = {kind: variants for kind, (_, variants) in _DRIVERS.items()}


class Driver(ABC):
    """One rank's side of an engine."""

    rank: int
    world_size: int
    version: str
    gpu: Gpu | None = None  # on which the calls run, in the order of its stream; None for the CPU

    @abstractmethod
    def arrays(self, kind: str) -> ArrayLibrary:
        """Return the arrays for this engine in a run where fastdist takes arrays of `kind`."""

    @abstractmethod
    def barrier_call(self) -> Call:
        """Return the engine's own barrier; on GPUs a call that makes their streams meet."""

    @abstractmethod
    def bind(self, case: Case, passes: Array | None, gets: Array | None) -> Call:
        """Bind arrays to the collective; the returned call does nothing else.

        Raises:
            UnsupportedCaseError: The engine lacks the operation, reduce op or dtype.
        """

    @abstractmethod
    def bind_list(self, case: Case, variant: str, arrays: Sequence[Array]) -> Call:
        """Bind a list of arrays to an all-reduce in place, in one of `LIST_VARIANTS`."""

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
        """Return `send_recv` by blocking calls.

        Even ranks send first and odd ranks receive first, to avoid a deadlock.
        """
        to, source = self.ring_neighbors()

        def even() -> None:
            send(passes, to)
            recv(gets, source)

        def odd() -> None:
            recv(gets, source)
            send(passes, to)

        return odd if self.rank % 2 else even


def open_driver(kind: str, folder: Path) -> Driver:
    """Start a driver of `LIST_VARIANTS` from the launcher's environment. Every rank must call.

    Ranks may meet in files of the run's `folder`.
    """
    driver: Driver = pkgutil.resolve_name(f"fastdist.cli.bench.{_DRIVERS[kind][0]}")(folder)
    return driver


class Bucket(NamedTuple):
    """A flat array, its parts, and the gradients that are copied into and out of these."""

    flat: Array
    parts: list[Array]
    arrays: list[Array]


def buckets_of(library: ArrayLibrary, arrays: Sequence[Array], dtype: str) -> list[Bucket]:
    """Split a list as DDP does: the array that fills a bucket of 25 MB closes it."""
    groups: list[list[Array]] = [[]]
    for array in map(library.flat, arrays):
        if sum(map(len, groups[-1])) * DTYPE_BYTES[dtype] >= _BUCKET_BYTES:
            groups.append([])
        groups[-1].append(array)
    buckets = []
    for group in groups:
        ends = list(accumulate(map(len, group), initial=0))
        flat = library.make([ends[-1]], dtype)
        buckets.append(Bucket(flat, [flat[start:end] for start, end in pairwise(ends)], group))
    return buckets


def one_after_the_other(
    library: ArrayLibrary, buckets: Sequence[Bucket], all_reduce: Callable[[Array], object]
) -> Call:
    """Return a call that reduces one bucket after the other."""

    def reduce() -> None:
        for bucket in buckets:
            library.copy_all(bucket.parts, bucket.arrays)
            all_reduce(bucket.flat)
            library.copy_all(bucket.arrays, bucket.parts)

    return reduce


def one_by_one(arrays: Sequence[Array], all_reduce: Callable[[Array], object]) -> Call:
    """Return a call that reduces one array after the other, without buckets."""

    def reduce() -> None:
        for array in arrays:
            all_reduce(array)

    return reduce
