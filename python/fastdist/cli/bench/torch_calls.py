"""The collectives of torch.distributed, with any backend."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Sequence
from functools import partial
from typing import Any

from fastdist.cli.bench.arrays import Array, ArrayLibrary, UnsupportedCaseError
from fastdist.cli.bench.buckets import Bucket, buckets_of, one_after_the_other, one_by_one
from fastdist.cli.bench.cases import Case
from fastdist.cli.bench.collectives import ROOT
from fastdist.cli.bench.driver import Call


class TorchCalls:
    """Binds torch tensors to calls of the default process group; the base of torch's drivers.

    With `overlap`, buckets are copied while others are reduced, as in DDP.
    """

    def __init__(self, library: ArrayLibrary, overlap: bool) -> None:
        self._dist: Any = importlib.import_module("torch.distributed")
        warnings.filterwarnings("ignore", category=FutureWarning)  # renamed collectives
        self._library = library
        self._overlap = overlap
        self.rank: int = self._dist.get_rank()
        self.world_size: int = self._dist.get_world_size()

    def arrays(self, kind: str) -> ArrayLibrary:
        return self._library

    def _redop(self, case: Case) -> Any:
        names = {"": "SUM", "sum": "SUM", "mean": "AVG", "prod": "PRODUCT"}
        return getattr(self._dist.ReduceOp, names.get(case.redop, case.redop.upper()))

    def bind(self, case: Case, passes: Array | None, gets: Array | None) -> Call:
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
        return partial(getattr(self._dist, name), *arguments)

    def _rooted(self, case: Case, passes: Array | None, gets: Array | None) -> Call:
        if case.collective == "gather":
            blocks = None if gets is None else list(gets.chunk(self.world_size))
            return partial(self._dist.gather, passes, blocks, ROOT)
        blocks = None if passes is None else list(passes.chunk(self.world_size))
        return partial(self._dist.scatter, gets, blocks, ROOT)

    def bind_list(self, case: Case, variant: str, arrays: Sequence[Array]) -> Call:
        all_reduce, redop = self._dist.all_reduce, self._redop(case)
        if variant == "coalesced":
            return partial(self._dist.all_reduce_coalesced, list(arrays), redop)
        if variant == "one by one":
            return one_by_one(arrays, lambda array: all_reduce(array, redop))
        if variant != "25 MB buckets":
            raise UnsupportedCaseError(f"torch.distributed has no {variant!r}")
        buckets = buckets_of(self._library, arrays, case.dtype)
        if self._overlap:
            return self._overlapped(buckets, redop)
        return one_after_the_other(self._library, buckets, lambda flat: all_reduce(flat, redop))

    def _overlapped(self, buckets: Sequence[Bucket], redop: Any) -> Call:
        all_reduce, copy_all = self._dist.all_reduce, self._library.copy_all

        def bucketed() -> None:
            works = []
            for bucket in buckets:
                copy_all(bucket.parts, bucket.arrays)
                works.append(all_reduce(bucket.flat, redop, async_op=True))
            for bucket, work in zip(buckets, works, strict=True):
                work.wait()
                copy_all(bucket.arrays, bucket.parts)

        return bucketed
