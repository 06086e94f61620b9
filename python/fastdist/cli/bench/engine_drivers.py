"""The drivers of all engines: fastdist, torch.distributed, MPI through mpi4py."""

from __future__ import annotations

import importlib
import os
import warnings
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

import fastdist  # registers the backend of torch.distributed
import fastdist._core as _core
from fastdist.cli.bench.cases import COLLECTIVES, ROOT, Case
from fastdist.cli.bench.driver import (
    Array,
    ArrayLibrary,
    Call,
    Driver,
    UnsupportedCaseError,
    bucketed,
    numpy_arrays,
    torch_arrays,
)
from fastdist.cli.bench.gpu import Gpu, gpu_of_rank
from fastdist.cluster.launch import detect_launch
from fastdist.collectives.engines import nccl_library


class FastdistDriver(Driver):
    """Calls go to the default communicator; on a GPU, in the order of torch's stream."""

    def __init__(self, gpu: Any = None) -> None:
        self.gpu = gpu
        self._comm = comm = fastdist.init()
        self.rank = comm.rank
        self.world_size = comm.world_size
        self.version = f"fastdist {fastdist.__version__}"
        self.barrier: Call = comm.barrier
        if gpu is not None:
            self.barrier = partial(comm.all_reduce, gpu.arrays.make((1,), "int32"))

    def arrays(self, kind: str) -> ArrayLibrary:
        if self.gpu is not None:
            library: ArrayLibrary = self.gpu.arrays
        else:
            library = torch_arrays() if kind == "torch" else numpy_arrays()
        return replace(library, make=self._empty) if kind == "empty" else library

    def _empty(self, shape: Sequence[int], dtype: str) -> Array:
        if self.gpu is None:
            return self._comm.empty(tuple(shape), dtype)
        torch_dtype = getattr(importlib.import_module("torch"), dtype)
        return self._comm.empty(tuple(shape), torch_dtype, f"cuda:{self.gpu.device}")

    def bind(self, case: Case, passes: Array | None, gets: Array | None) -> Call:
        comm = self._comm
        # The default reduce op is omitted, as users do.
        redop = () if case.redop in ("", "sum") else (case.redop,)
        if case.collective == "barrier":
            return comm.barrier
        if case.collective == "send_recv":
            return self.ring_call(comm.send, comm.recv, passes, gets)
        call = getattr(comm, case.collective)
        if case.collective in ("gather", "scatter"):
            return partial(call, passes, ROOT, out=gets)
        if gets is None:
            return partial(call, passes, *redop)
        return partial(call, passes, *redop, out=gets)

    def bind_list(self, case: Case, arrays: Sequence[Array]) -> Call:
        return partial(self._comm.all_reduce, list(arrays), case.redop)

    def close(self) -> None:
        if self.gpu is not None:
            self.gpu.synchronize()
        self._comm.close()


def open_cuda() -> FastdistDriver:
    """Start fastdist on this rank's GPU."""
    launch = detect_launch()
    driver = FastdistDriver(Gpu(gpu_of_rank(0 if launch is None else launch.local_rank)))
    driver.version += f" with NCCL {nccl_library.load().version_text}"
    return driver


class TorchDriver(Driver):
    """Calls go to torch's default process group; on a GPU, in the order of torch's stream.

    With `overlap`, buckets are copied while others are reduced, as in DDP, and `send_recv` is one
    batch, as torch recommends for NCCL.
    """

    def __init__(self, version: str, gpu: Any = None, overlap: bool = False) -> None:
        self._dist: Any = importlib.import_module("torch.distributed")
        warnings.filterwarnings("ignore", category=FutureWarning)  # renamed collectives
        self.version = version
        self.gpu = gpu
        self._library: ArrayLibrary = torch_arrays() if gpu is None else gpu.arrays
        self._overlap = overlap
        self.rank: int = self._dist.get_rank()
        self.world_size: int = self._dist.get_world_size()
        self.barrier = self._dist.barrier
        if gpu is not None:
            self.barrier = partial(self._dist.all_reduce, self._library.make((1,), "int32"))

    def arrays(self, kind: str) -> ArrayLibrary:
        return self._library

    def _redop(self, case: Case) -> Any:
        names = {"": "SUM", "sum": "SUM", "mean": "AVG", "prod": "PRODUCT"}
        return getattr(self._dist.ReduceOp, names.get(case.redop, case.redop.upper()))

    def bind(self, case: Case, passes: Array | None, gets: Array | None) -> Call:
        dist, redop = self._dist, self._redop(case)
        if case.collective == "send_recv":
            if not self._overlap:
                return self.ring_call(dist.send, dist.recv, passes, gets)
            to, source = self.ring_neighbors()
            pair = [dist.P2POp(dist.isend, passes, to), dist.P2POp(dist.irecv, gets, source)]
            return lambda: [work.wait() for work in dist.batch_isend_irecv(pair)]
        if case.collective == "gather":
            return partial(dist.gather, passes, self._blocks(gets), ROOT)
        if case.collective == "scatter":
            return partial(dist.scatter, gets, self._blocks(passes), ROOT)
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

    def _blocks(self, array: Array | None) -> list[Array] | None:
        return None if array is None else list(array.chunk(self.world_size))

    def bind_list(self, case: Case, arrays: Sequence[Array]) -> Call:
        redop = self._redop(case)
        begin = partial(self._dist.all_reduce, op=redop, async_op=self._overlap)
        copy_all = importlib.import_module("torch")._foreach_copy_
        return bucketed(self._library, copy_all, arrays, case.dtype, begin, self._overlap)

    def close(self) -> None:
        if self.gpu is not None:
            self.gpu.synchronize()
        self._dist.destroy_process_group()


def _join(backend: str) -> str:
    """Make the default process group on the CPU; return torch's version."""
    torch: Any = importlib.import_module("torch")
    torch.set_num_threads(1)
    torch.distributed.init_process_group(backend)
    return str(torch.__version__.partition("+")[0])


def open_gloo() -> TorchDriver:
    """Start Gloo."""
    return TorchDriver(f"gloo of torch {_join('gloo')}")


def open_fastdist() -> TorchDriver:
    """Start fastdist as a backend of torch.distributed."""
    _join("fastdist")
    return TorchDriver(f"fastdist {fastdist.__version__} through torch.distributed")


def open_nccl() -> TorchDriver:
    """Start torch's NCCL on this rank's GPU."""
    torch: Any = importlib.import_module("torch")
    major, minor, patch = torch.cuda.nccl.version()[:3]
    if int(os.environ["WORLD_SIZE"]) > len(_core.cuda_devices()):
        nccl_library.allow_sharing(10000 * major + 100 * minor + patch)  # as fastdist's engine does
    gpu = Gpu(gpu_of_rank(int(os.environ["RANK"])))
    torch.distributed.init_process_group("nccl", device_id=torch.device("cuda", gpu.device))
    version = f"torch.distributed {torch.__version__.partition('+')[0]}"
    return TorchDriver(f"{version} with NCCL {major}.{minor}.{patch}", gpu, overlap=True)


def _copy_all(to: Sequence[Array], source: Sequence[Array]) -> None:
    for target, array in zip(to, source, strict=True):
        target[...] = array


class MpiDriver(Driver):
    """Calls go to COMM_WORLD.

    For torch tensors, users of mpi4py would pass `tensor.numpy()`, made once.
    """

    def __init__(self) -> None:
        self._mpi: Any = importlib.import_module("mpi4py.MPI")
        self._comm: Any = self._mpi.COMM_WORLD
        self.rank: int = self._comm.rank
        self.world_size: int = self._comm.size
        self.barrier = self._comm.Barrier
        vendor, numbers = self._mpi.get_vendor()
        self.version = f"{vendor} {'.'.join(map(str, numbers))}"

    def arrays(self, kind: str) -> ArrayLibrary:
        return numpy_arrays()

    def _redop(self, case: Case) -> Any:
        if COLLECTIVES[case.collective].reduces and case.dtype == "float16":
            raise UnsupportedCaseError("MPI has no 16-bit floating point numbers")
        if case.redop == "mean":
            raise UnsupportedCaseError("MPI has no mean")
        return getattr(self._mpi, case.redop.upper() or "SUM")

    def bind(self, case: Case, passes: Array | None, gets: Array | None) -> Call:
        comm, in_place = self._comm, self._mpi.IN_PLACE
        redop = self._redop(case)
        if case.dtype == "float16":
            passes, gets = (None if a is None else a.view(np.uint16) for a in (passes, gets))
        if case.collective == "send_recv":
            return self.ring_call(comm.Send, comm.Recv, passes, gets)
        reduced = (in_place, passes) if self.rank == ROOT else (passes, None)
        calls: dict[str, tuple[str, tuple[Any, ...]]] = {
            "all_reduce": ("Allreduce", (in_place, passes, redop)),
            "reduce": ("Reduce", (*reduced, redop, ROOT)),
            "broadcast": ("Bcast", (passes, ROOT)),
            "all_gather": ("Allgather", (passes, gets)),
            "gather": ("Gather", (passes, gets, ROOT)),
            "scatter": ("Scatter", (passes, gets, ROOT)),
            "reduce_scatter": ("Reduce_scatter_block", (passes, gets, redop)),
            "all_to_all": ("Alltoall", (passes, gets)),
            "barrier": ("Barrier", ()),
        }
        name, arguments = calls[case.collective]
        return partial(getattr(comm, name), *arguments)

    def bind_list(self, case: Case, arrays: Sequence[Array]) -> Call:
        all_reduce, in_place, redop = self._comm.Allreduce, self._mpi.IN_PLACE, self._redop(case)

        def reduce(flat: Array) -> None:
            all_reduce(in_place, flat, redop)

        return bucketed(numpy_arrays(), _copy_all, arrays, case.dtype, reduce)

    def close(self) -> None:
        self._mpi.Finalize()
