"""Interface of an engine for a rank, and the table of engines."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from fastdist.cli.bench.arrays import Array, ArrayLibrary
from fastdist.cli.bench.cases import Case
from fastdist.cli.bench.gpu import Gpu

Call = Callable[[], object]

_BUCKETED = "25 MB buckets"
_TORCH = (_BUCKETED, "one by one", "coalesced")
# The class of each driver, and its ways to reduce a list of gradients; ratios are made with the
# first way.
_DRIVERS = {
    "fastdist": ("fastdist_driver:FastdistDriver", ("list", "one array")),
    "fastdist_torch": ("torch_host:FastdistTorchDriver", _TORCH),
    "gloo": ("torch_host:GlooDriver", _TORCH),
    "mlx": ("mlx_driver:MlxDriver", ("concatenated",)),
    "deepspeed": ("deepspeed_driver:DeepSpeedDriver", ("one by one",)),
    "mpi": ("mpi_driver:MpiDriver", (_BUCKETED,)),
    "fastdist_cuda": ("fastdist_driver:FastdistCudaDriver", ("list", "list in bf16", "one array")),
    "torch_nccl": ("torch_nccl_driver:TorchNcclDriver", _TORCH),
}
LIST_VARIANTS = {kind: variants for kind, (_, variants) in _DRIVERS.items()}


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
        folder: Folder of this run, the same for all ranks, for engines with a rendezvous in a file.
    """
    driver: Driver = pkgutil.resolve_name(f"fastdist.cli.bench.{_DRIVERS[kind][0]}")(folder)
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
