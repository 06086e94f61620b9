"""What a rank must know of its engine, and the engines that there are."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from fastdist.cli.bench.arrays import Array, ArrayLibrary
from fastdist.cli.bench.cases import Case
from fastdist.cli.bench.gpu import Gpu

Call = Callable[[], object]

# Ways to reduce a list of gradients, by driver; the first is the one that ratios are made with.
LIST_VARIANTS = {
    "fastdist": ("list", "one array"),
    "gloo": ("25 MB buckets", "one by one", "coalesced"),
    "mpi": ("25 MB buckets",),
    "fastdist_cuda": ("list", "list in bf16", "one array"),
    "torch_nccl": ("25 MB buckets", "one by one", "coalesced"),
}
BUCKET_BYTES = 25 << 20


class Driver(Protocol):
    """One rank's side of an engine. `rank`, `world_size` and `version` are set when it is made."""

    rank: int
    world_size: int
    version: str

    @property
    def gpu(self) -> Gpu | None:
        """Where the calls run that are measured, in its stream's order; None: on the CPU."""

    def arrays(self, kind: str) -> ArrayLibrary:
        """The arrays this engine is called with when fastdist is called with arrays of `kind`."""

    def barrier_call(self) -> Call:
        """The engine's own barrier; on GPUs what lets their streams wait for each other."""

    def bind(self, case: Case, passes: Array | None, gets: Array | None) -> Call:
        """The collective on these arrays; nothing but the call itself is left to be done.

        Raises:
            UnsupportedCaseError: The engine lacks the operation, reduce op or dtype.
        """

    def bind_list(self, case: Case, variant: str, arrays: Sequence[Array]) -> Call:
        """An all-reduce in place of a list of arrays, in one of `LIST_VARIANTS`."""

    def close(self) -> None:
        """Leaves the engine. Every rank must call."""


def open_driver(kind: str, folder: Path) -> Driver:
    """Starts a driver of `LIST_VARIANTS` from the launcher's environment. Every rank must call.

    Args:
        folder: Private to this run and the same for all ranks, for engines that meet in a file.
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
    """`send_recv` with an engine's blocking calls: to the next rank, from the last.

    Even ranks send first and odd ones receive first, so that no call waits for itself.
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
