"""Drives cupy's own binding of NCCL, `cupy.cuda.nccl`, which is called with addresses."""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from fastdist.cli.bench.arrays import Array, ArrayLibrary, UnsupportedCaseError
from fastdist.cli.bench.buckets import Buckets
from fastdist.cli.bench.cases import Case
from fastdist.cli.bench.collectives import ROOT
from fastdist.cli.bench.driver import BUCKET_BYTES, Call, Driver
from fastdist.cli.bench.gpu import meet, nccl_version_text, open_gpu, prepare_for_sharing


class CupyDriver:
    """Calls go to a communicator over all ranks, on cupy's stream."""

    def __init__(self, folder: Path) -> None:
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        cupy: Any = importlib.import_module("cupy")
        self._nccl: Any = importlib.import_module("cupy.cuda.nccl")
        if not self._nccl.available:
            raise RuntimeError(
                f"cupy {cupy.__version__} finds no NCCL: pip install nvidia-nccl-cu13, or -cu12 "
                "where cupy is for CUDA 12"
            )
        nccl_version = int(self._nccl.get_version())
        prepare_for_sharing(nccl_version, world_size)
        self.gpu = open_gpu(rank, "cupy")
        identity = identity_of(meet(folder, "cupy.id", rank, self._make_identity))
        self._comm: Any = self._nccl.NcclCommunicator(world_size, identity, rank)
        self.rank: int = rank
        self.world_size: int = world_size
        self.version = f"cupy {cupy.__version__} with NCCL {nccl_version_text(nccl_version)}"
        self._flag = self.gpu.arrays.make((1,), "int32")

    def _make_identity(self) -> bytes:
        return text_of(self._nccl.get_unique_id())

    def arrays(self, kind: str) -> ArrayLibrary:
        """See `Driver`."""
        return self.gpu.arrays

    def barrier_call(self) -> Call:
        """See `Driver`."""
        return self._reduced_in_place(self._flag, "int32", self._nccl.NCCL_SUM)

    def _reduced_in_place(self, array: Array, dtype: str, redop: int) -> Call:
        address = array.data.ptr
        kind, stream = self._dtype(dtype), self.gpu.stream
        return partial(self._comm.allReduce, address, address, array.size, kind, redop, stream)

    def _dtype(self, dtype: str) -> int:
        if dtype == "int16":
            raise UnsupportedCaseError("NCCL has no int16")
        kind: int = getattr(self._nccl, f"NCCL_{dtype.upper()}")
        return kind

    def _redop(self, case: Case) -> int:
        name = "AVG" if case.redop == "mean" else case.redop.upper() or "SUM"
        redop: int = getattr(self._nccl, f"NCCL_{name}")
        return redop

    def bind(self, case: Case, passes: Array | None, gets: Array | None) -> Call:
        """See `Driver`."""
        if case.collective in ("send_recv", "all_to_all", "gather", "scatter"):
            return self._exchange(case, passes, gets)
        assert passes is not None  # only scatter has ranks that pass nothing
        kind, redop, stream = self._dtype(case.dtype), self._redop(case), self.gpu.stream
        address, comm = passes.data.ptr, self._comm
        to = address if gets is None else gets.data.ptr
        count = case.count
        if case.collective == "all_reduce":
            return partial(comm.allReduce, address, address, count, kind, redop, stream)
        if case.collective == "reduce":
            return partial(comm.reduce, address, address, count, kind, redop, ROOT, stream)
        if case.collective == "broadcast":
            return partial(comm.broadcast, address, address, count, kind, ROOT, stream)
        if case.collective == "all_gather":
            return partial(comm.allGather, address, to, count, kind, stream)
        if case.collective == "reduce_scatter":
            return partial(comm.reduceScatter, address, to, count, kind, redop, stream)
        raise UnsupportedCaseError(f"cupy has no {case.collective}")

    def _exchange(self, case: Case, passes: Array | None, gets: Array | None) -> Call:
        """Sends and receives as one group, of which NCCL makes the other collectives, too."""
        kind, stream, comm, nccl = self._dtype(case.dtype), self.gpu.stream, self._comm, self._nccl
        block_bytes = case.count * self._item_bytes(passes, gets)
        everyone, root_only = range(self.world_size), (ROOT,)
        next_rank, last_rank = ((self.rank + step) % self.world_size for step in (1, -1))
        sends, receives = {
            "send_recv": ((next_rank,), (last_rank,)),
            "all_to_all": (everyone, everyone),
            "gather": (root_only, everyone),
            "scatter": (everyone, root_only),
        }[case.collective]
        outgoing = [] if passes is None else self._blocks(passes, sends, block_bytes)
        incoming = [] if gets is None else self._blocks(gets, receives, block_bytes)

        def exchange() -> None:
            nccl.groupStart()
            for peer, address in outgoing:
                comm.send(address, case.count, kind, peer, stream)
            for peer, address in incoming:
                comm.recv(address, case.count, kind, peer, stream)
            nccl.groupEnd()

        return exchange

    @staticmethod
    def _item_bytes(passes: Array | None, gets: Array | None) -> int:
        array: Any = gets if passes is None else passes
        item_bytes: int = array.itemsize
        return item_bytes

    @staticmethod
    def _blocks(array: Array, peers: Sequence[int], block_bytes: int) -> list[tuple[int, int]]:
        """For each peer its block's address; one peer alone has the whole array."""
        return [(peer, array.data.ptr + i * block_bytes) for i, peer in enumerate(peers)]

    def bind_list(self, case: Case, variant: str, arrays: Sequence[Array]) -> Call:
        """See `Driver`."""
        redop, library, nccl = self._redop(case), self.gpu.arrays, self._nccl
        if variant == "one group":
            calls = [self._reduced_in_place(array, case.dtype, redop) for array in arrays]

            def grouped() -> None:
                nccl.groupStart()
                for call in calls:
                    call()
                nccl.groupEnd()

            return grouped
        if variant != "25 MB buckets":
            raise UnsupportedCaseError(f"cupy has no {variant!r}")
        buckets = Buckets(library, arrays, case.dtype, BUCKET_BYTES)
        reduced = [
            (bucket, self._reduced_in_place(bucket.flat, case.dtype, redop)) for bucket in buckets
        ]

        def bucketed() -> None:
            for bucket, reduce in reduced:
                library.copy_all(bucket.parts, bucket.arrays)
                reduce()
                library.copy_all(bucket.arrays, bucket.parts)

        return bucketed

    def close(self) -> None:
        """See `Driver`."""
        self.gpu.synchronize()
        self._comm.destroy()


def text_of(identity: bytes | tuple[int, ...]) -> bytes:
    """An identity of a communicator: bytes since cupy 14, before that signed numbers."""
    return json.dumps([isinstance(identity, bytes), list(identity)]).encode()


def identity_of(text: bytes) -> bytes | tuple[int, ...]:
    """What `text_of` was given."""
    is_bytes, numbers = json.loads(text)
    return bytes(numbers) if is_bytes else tuple(numbers)


def open_driver(folder: Path, array: str) -> Driver:
    """Joins the other ranks. Every rank must call."""
    return CupyDriver(folder)
