"""Interface of an engine for a rank, and the table of engines."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from fastdist.cli.bench.arrays import Array, ArrayLibrary
from fastdist.cli.bench.cases import Case
from fastdist.cli.bench.gpu import Gpu

Call = Callable[[], object]

# Ways to reduce a list of gradients, by driver; ratios are made with the first way.
LIST_VARIANTS = {
    "fastdist": ("list", "one array"),
    "fastdist_torch": ("25 MB buckets", "one by one", "coalesced"),
    "gloo": ("25 MB buckets", "one by one", "coalesced"),
    "mlx": ("concatenated",),
    "deepspeed": ("one by one",),
    "mpi": ("25 MB buckets",),
    "fastdist_cuda": ("list", "list in bf16", "one array"),
    "torch_nccl": ("25 MB buckets", "one by one", "coalesced"),
}
BUCKET_BYTES = 25 << 20


class Driver(Protocol):
    """One rank's side of an engine."""

    rank: int
    world_size: int
    version: str

    @property
    def gpu(self) -> Gpu | None:
        """The GPU on which the calls run, in the order of its stream; None for the CPU."""

    def arrays(self, kind: str) -> ArrayLibrary:
        """Return the arrays for this engine in a run where fastdist takes arrays of `kind`."""

    def barrier_call(self) -> Call:
        """Return the engine's own barrier; on GPUs a call that makes their streams meet."""

    def bind(self, case: Case, passes: Array | None, gets: Array | None) -> Call:
        """Bind arrays to the collective; the returned call does nothing else.

        Raises:
            UnsupportedCaseError: The engine lacks the operation, reduce op or dtype.
        """

    def bind_list(self, case: Case, variant: str, arrays: Sequence[Array]) -> Call:
        """Bind a list of arrays to an all-reduce in place, in one of `LIST_VARIANTS`."""

    def close(self) -> None:
        """Leave the engine. Every rank must call."""


def open_driver(kind: str, folder: Path) -> Driver:
    """Start a driver of `LIST_VARIANTS` from the launcher's environment. Every rank must call.

    Args:
        folder: Folder of this run, the same for all ranks, for engines that meet in a file.
    """
    module = importlib.import_module(f"fastdist.cli.bench.{kind}_driver")
    driver: Driver = module.open_driver(folder)
    return driver


def ring_call(
    rank: int,
    world_size: int,
    send: Callable[[Array, int], object],
    recv: Callable[[Array, int], object],
    buffers: tuple[Array, Array],
) -> Call:
    """Return `send_recv` by blocking calls: to the next rank, from the previous rank.

    Even ranks send first and odd ranks receive first, to avoid a deadlock.
    """
    passes, gets = buffers
    to, source = (rank + 1) % world_size, (rank - 1) % world_size

    def even() -> None:
        send(passes, to)
        recv(gets, source)

    def odd() -> None:
        recv(gets, source)
        send(passes, to)

    return odd if rank % 2 else even
