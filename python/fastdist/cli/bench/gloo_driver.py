"""Drives torch.distributed's Gloo, with torch tensors whatever fastdist is called with."""

from __future__ import annotations

import importlib
import os
import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from fastdist.cli.bench.arrays import Array, ArrayLibrary, UnsupportedCaseError, torch_arrays
from fastdist.cli.bench.buckets import Buckets
from fastdist.cli.bench.cases import Case
from fastdist.cli.bench.collectives import ROOT
from fastdist.cli.bench.driver import BUCKET_BYTES, Call, Driver, ring_call


class GlooDriver:
    """Calls go to torch.distributed's default process group."""

    def __init__(self, store: Path) -> None:
        self._torch: Any = importlib.import_module("torch")
        self._dist: Any = importlib.import_module("torch.distributed")
        warnings.filterwarnings("ignore", category=FutureWarning)  # renamed collectives
        self._torch.set_num_threads(1)
        self._dist.init_process_group(
            "gloo",
            init_method=f"file://{store}",
            rank=int(os.environ["RANK"]),
            world_size=int(os.environ["WORLD_SIZE"]),
        )
        self.rank: int = self._dist.get_rank()
        self.world_size: int = self._dist.get_world_size()
        self.version = f"gloo of torch {self._torch.__version__.partition('+')[0]}"

    def arrays(self, kind: str) -> ArrayLibrary:
        """See `Driver`."""
        return torch_arrays()

    def barrier_call(self) -> Call:
        """See `Driver`."""
        call: Call = self._dist.barrier
        return call

    def _redop(self, case: Case) -> Any:
        names = {"": "SUM", "sum": "SUM", "mean": "AVG", "prod": "PRODUCT"}
        return getattr(self._dist.ReduceOp, names.get(case.redop, case.redop.upper()))

    def bind(self, case: Case, passes: Array | None, gets: Array | None) -> Call:
        """See `Driver`."""
        dist = self._dist
        if case.collective == "send_recv":
            return ring_call(
                self.rank, self.world_size, self._dist.send, self._dist.recv, (passes, gets)
            )
        if case.collective in ("gather", "scatter"):
            return self._rooted(case, passes, gets)
        redop = self._redop(case)
        calls: dict[str, tuple[str, tuple[Any, ...]]] = {
            "all_reduce": ("all_reduce", (passes, redop)),
            "reduce": ("reduce", (passes, ROOT, redop)),
            "broadcast": ("broadcast", (passes, ROOT)),
            "all_gather": ("all_gather_into_tensor", (gets, passes)),
            "reduce_scatter": ("reduce_scatter_tensor", (gets, passes, redop)),
            "all_to_all": ("all_to_all_single", (gets, passes)),
            "barrier": ("barrier", ()),
        }
        name, arguments = calls[case.collective]
        return partial(getattr(dist, name), *arguments)

    def _rooted(self, case: Case, passes: Array | None, gets: Array | None) -> Call:
        if case.collective == "gather":
            blocks = None if gets is None else list(gets.chunk(self.world_size))
            return partial(self._dist.gather, passes, blocks, ROOT)
        blocks = None if passes is None else list(passes.chunk(self.world_size))
        return partial(self._dist.scatter, gets, blocks, ROOT)

    def bind_list(self, case: Case, variant: str, arrays: Sequence[Array]) -> Call:
        """See `Driver`."""
        all_reduce, redop = self._dist.all_reduce, self._redop(case)
        if variant == "coalesced":
            return partial(self._dist.all_reduce_coalesced, list(arrays), redop)
        if variant == "one by one":

            def one_by_one() -> None:
                for array in arrays:
                    all_reduce(array, redop)

            return one_by_one
        if variant != "25 MB buckets":
            raise UnsupportedCaseError(f"gloo has no {variant!r}")
        buckets = Buckets(torch_arrays(), arrays, case.dtype, BUCKET_BYTES)
        copy_all = self._torch._foreach_copy_

        def bucketed() -> None:
            for bucket in buckets:
                copy_all(bucket.parts, bucket.arrays)
                all_reduce(bucket.flat, redop)
                copy_all(bucket.arrays, bucket.parts)

        return bucketed

    def close(self) -> None:
        """See `Driver`."""
        self._dist.destroy_process_group()


def open_driver(folder: Path) -> Driver:
    """Joins the other ranks. Every rank must call."""
    return GlooDriver(folder / "gloo.store")
