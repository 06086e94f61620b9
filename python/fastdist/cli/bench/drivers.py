"""The drivers of all engines: fastdist, torch.distributed, MPI through mpi4py; and their arrays."""

from __future__ import annotations

import importlib
import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

import fastdist  # registers the backend of torch.distributed
import fastdist._core as _core
from fastdist.cli.bench.cases import COLLECTIVES, DTYPE_BYTES, ROOT, Case
from fastdist.collectives.engines import nccl_library

Array = Any  # a numpy array or a torch tensor
Block = npt.NDArray[Any]
Call = Callable[[], object]
Transfer = Callable[[Array, int], object]  # of an array, to or from a rank

_BUCKET_BYTES = 25 << 20


class UnsupportedCaseError(Exception):
    """The engine does not support the operation, dtype or array."""


@dataclass(frozen=True, slots=True)
class ArrayLibrary:
    """Makes, fills and reads one library's arrays."""

    make: Callable[[Sequence[int], str], Array]  # uninitialized, of a shape and a dtype name
    fill: Callable[[Array, float], object]  # sets every element
    write: Callable[[Array, Block], object]  # copies a block into a flat array of its size
    read: Callable[[Array], Block]  # a flat array's elements; float32 if numpy lacks the dtype


def _numpy_array(shape: Sequence[int], dtype: str) -> Array:
    if dtype == "bfloat16":
        raise UnsupportedCaseError("numpy has no bfloat16")
    return np.empty(tuple(shape), dtype)


NUMPY_ARRAYS = ArrayLibrary(_numpy_array, np.ndarray.fill, np.copyto, lambda flat: flat)


def torch_arrays(device: str = "cpu") -> ArrayLibrary:
    """Return the library of torch tensors."""
    torch: Any = importlib.import_module("torch")

    def read(flat: Array) -> Block:
        block: Block = (flat.float() if flat.dtype == torch.bfloat16 else flat).cpu().numpy()
        return block

    return ArrayLibrary(
        make=lambda shape, dtype: torch.empty(shape, dtype=getattr(torch, dtype), device=device),
        fill=torch.Tensor.fill_,
        write=lambda flat, block: flat.copy_(torch.from_numpy(block)),
        read=read,
    )


class Gpu:
    """The GPU of this rank and a torch stream, both made current in this thread.

    Ranks take GPUs in turn, and share GPUs if there are too few.
    """

    def __init__(self, rank: int) -> None:
        torch: Any = importlib.import_module("torch")
        if not torch.cuda.is_available():
            raise RuntimeError(
                f"torch {torch.__version__} sees no GPU: it was built for "
                f"{'CUDA ' + torch.version.cuda if torch.version.cuda else 'CPUs'}; "
                "install a torch for this machine's CUDA, see pytorch.org"
            )
        self.device = device = rank % len(_core.cuda_devices())
        torch.cuda.set_device(device)
        self._cuda = torch.cuda
        self._stream = torch.cuda.Stream()  # the default one cannot be captured
        torch.cuda.set_stream(self._stream)
        self.event = partial(torch.cuda.Event, enable_timing=True)
        self.synchronize = torch.cuda.synchronize
        self.arrays = torch_arrays(f"cuda:{device}")

    def copy_call(self, nbytes: int) -> Call:
        """Return a call that enqueues a copy between two new buffers."""
        to, source = (self.arrays.make((nbytes,), "uint8") for _ in range(2))
        source.fill_(1)
        return lambda: to.copy_(source)

    def capture(self, call: Call) -> Call:
        """Capture a call in a graph; return a call that enqueues the graph."""
        graph = self._cuda.CUDAGraph()
        # Threads that watch communicators may query their events during the capture.
        with self._cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"):
            call()
        replay: Call = graph.replay
        return replay


@dataclass(slots=True)
class Driver:
    """One rank's side of an engine.

    Attributes:
        barrier: The engine's own barrier; on GPUs a call that makes their streams meet.
        leave: Leaves the engine. Every rank must call.
        arrays: Returns the arrays for this engine in a run where fastdist takes arrays of a kind.
        bind: Binds the array that the collective passes, or a case's list, and the one that it
            gets, None where there is none; the returned call does nothing else. Raises
            `UnsupportedCaseError` if the engine lacks the operation, reduce op or dtype.
        gpu: `Gpu` on which the calls run, in the order of its stream; None for the CPU.
    """

    rank: int
    world_size: int
    version: str
    barrier: Call
    leave: Call
    arrays: Callable[[str], ArrayLibrary]
    bind: Callable[[Case, Any, Array | None], Call]
    gpu: Any = None


def _ring_call(
    rank: int, world_size: int, send: Transfer, passes: Array, recv: Transfer, gets: Array
) -> Call:
    """Return `send_recv` by blocking calls; without a deadlock, as odd ranks receive first."""
    to, source = (rank + 1) % world_size, (rank - 1) % world_size
    pair = [partial(send, passes, to), partial(recv, gets, source)]
    first, second = reversed(pair) if rank % 2 else pair
    return lambda: (first(), second())


def bucketed(
    library: ArrayLibrary,
    copy_all: Callable[[Sequence[Array], Sequence[Array]], object],
    arrays: Sequence[Array],
    dtype: str,
    begin: Callable[[Array], Any],
) -> Call:
    """Return a call that reduces a list as DDP does, in buckets of 25 MB; what fills one closes it.

    `copy_all` copies to arrays, from arrays. `begin` reduces a flat array; what it returns, if
    anything, is waited for when all are begun, so that buckets are copied while others are reduced.
    """
    groups: list[list[Array]] = [[]]
    for array in (array.reshape(-1) for array in arrays):
        if sum(map(len, groups[-1])) * DTYPE_BYTES[dtype] >= _BUCKET_BYTES:
            groups.append([])
        groups[-1].append(array)
    buckets = []
    for group in groups:
        ends = list(accumulate(map(len, group), initial=0))
        flat = library.make([ends[-1]], dtype)
        buckets.append((flat, [flat[start:end] for start, end in pairwise(ends)], group))

    def reduce() -> None:
        begun = []
        for flat, parts, group in buckets:
            copy_all(parts, group)
            if work := begin(flat):
                begun.append((work, parts, group))
            else:
                copy_all(group, parts)
        for work, parts, group in begun:
            work.wait()
            copy_all(group, parts)

    return reduce


def open_fastdist(gpu: Any = None) -> Driver:
    """Start fastdist's default communicator; on a GPU, it works in the order of torch's stream."""
    comm = fastdist.init()
    version, barrier = f"fastdist {fastdist.__version__}", comm.barrier
    if gpu is not None:
        version += f" with NCCL {nccl_library.load().version_text}"
        barrier = partial(comm.all_reduce, gpu.arrays.make((1,), "int32"))

    def empty(shape: Sequence[int], dtype: str) -> Array:
        if gpu is None:
            return comm.empty(tuple(shape), dtype)
        torch_dtype = getattr(importlib.import_module("torch"), dtype)
        return comm.empty(tuple(shape), torch_dtype, f"cuda:{gpu.device}")

    def arrays(kind: str) -> ArrayLibrary:
        library = NUMPY_ARRAYS if gpu is None else gpu.arrays
        if gpu is None and kind == "torch":
            library = torch_arrays()
        return replace(library, make=empty) if kind == "empty" else library

    def bind(case: Case, passes: Any, gets: Array | None) -> Call:
        if case.collective == "barrier":
            return comm.barrier
        if case.collective == "send_recv":
            return _ring_call(comm.rank, comm.world_size, comm.send, passes, comm.recv, gets)
        call = getattr(comm, case.collective)
        if case.collective in ("gather", "scatter"):
            return partial(call, passes, ROOT, out=gets)
        # The default reduce op is omitted, as users do.
        redop = () if case.redop in ("", "sum") else (case.redop,)
        out = {} if gets is None else {"out": gets}
        return partial(call, passes, *redop, **out)

    return Driver(comm.rank, comm.world_size, version, barrier, comm.close, arrays, bind, gpu)


def _open_torch(backend: str, version: str) -> Driver:
    """Start torch's default process group; on a GPU, it works in the order of torch's stream.

    On a GPU, buckets are copied while others are reduced, as in DDP, and `send_recv` is one batch,
    as torch recommends for NCCL.
    """
    torch: Any = importlib.import_module("torch")
    dist = torch.distributed
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", category=FutureWarning)  # renamed collectives
    version = version.format(torch.__version__.partition("+")[0])
    gpu: Any = None
    library, barrier = torch_arrays(), dist.barrier
    if backend == "nccl":
        major, minor, patch = torch.cuda.nccl.version()[:3]
        version += f" with NCCL {major}.{minor}.{patch}"
        if int(os.environ["WORLD_SIZE"]) > len(_core.cuda_devices()):
            nccl_library.allow_sharing(10000 * major + 100 * minor + patch)  # as fastdist does
        gpu = Gpu(int(os.environ["RANK"]))
        library = gpu.arrays
        barrier = partial(dist.all_reduce, library.make((1,), "int32"))
    dist.init_process_group(backend, device_id=gpu and torch.device("cuda", gpu.device))
    rank, world_size = dist.get_rank(), dist.get_world_size()

    def blocks(array: Array | None) -> list[Array] | None:
        return None if array is None else list(array.chunk(world_size))

    def bind(case: Case, passes: Any, gets: Array | None) -> Call:
        names = {"": "SUM", "mean": "AVG", "prod": "PRODUCT"}
        redop = getattr(dist.ReduceOp, names.get(case.redop, case.redop.upper()))
        if case.model:
            begin = partial(dist.all_reduce, op=redop, async_op=gpu is not None)
            return bucketed(library, torch._foreach_copy_, passes, case.dtype, begin)
        if case.collective == "send_recv":
            if gpu is None:
                return _ring_call(rank, world_size, dist.send, passes, dist.recv, gets)
            pair = [
                dist.P2POp(dist.isend, passes, (rank + 1) % world_size),
                dist.P2POp(dist.irecv, gets, (rank - 1) % world_size),
            ]
            return lambda: [work.wait() for work in dist.batch_isend_irecv(pair)]
        calls: dict[str, Call] = {
            "all_reduce": partial(dist.all_reduce, passes, redop),
            "reduce": partial(dist.reduce, passes, ROOT, redop),
            "broadcast": partial(dist.broadcast, passes, ROOT),
            "all_gather": partial(dist.all_gather_into_tensor, gets, passes),
            "gather": partial(dist.gather, passes, blocks(gets), ROOT),
            "scatter": partial(dist.scatter, gets, blocks(passes), ROOT),
            "reduce_scatter": partial(dist.reduce_scatter_tensor, gets, passes, redop),
            "all_to_all": partial(dist.all_to_all_single, gets, passes),
            "barrier": dist.barrier,
        }
        return calls[case.collective]

    leave = dist.destroy_process_group
    return Driver(rank, world_size, version, barrier, leave, lambda kind: library, bind, gpu)


def _open_mpi() -> Driver:
    """Start MPI; calls go to COMM_WORLD.

    For torch tensors, users of mpi4py would pass `tensor.numpy()`, made once.
    """
    mpi: Any = importlib.import_module("mpi4py.MPI")
    comm, in_place = mpi.COMM_WORLD, mpi.IN_PLACE
    rank, size = comm.rank, comm.size
    vendor, numbers = mpi.get_vendor()

    def copy_all(to: Sequence[Array], source: Sequence[Array]) -> None:
        for target, array in zip(to, source, strict=True):
            target[...] = array

    def bind(case: Case, passes: Any, gets: Array | None) -> Call:
        if COLLECTIVES[case.collective].reduces and case.dtype == "float16":
            raise UnsupportedCaseError("MPI has no 16-bit floating point numbers")
        if case.redop == "mean":
            raise UnsupportedCaseError("MPI has no mean")
        redop = getattr(mpi, case.redop.upper() or "SUM")
        if case.model:
            begin = partial(comm.Allreduce, in_place, op=redop)
            return bucketed(NUMPY_ARRAYS, copy_all, passes, case.dtype, begin)
        if case.dtype == "float16":
            passes, gets = (None if a is None else a.view(np.uint16) for a in (passes, gets))
        if case.collective == "send_recv":
            return _ring_call(rank, size, comm.Send, passes, comm.Recv, gets)
        reduced = (in_place, passes) if rank == ROOT else (passes, None)
        calls: dict[str, Call] = {
            "all_reduce": partial(comm.Allreduce, in_place, passes, redop),
            "reduce": partial(comm.Reduce, *reduced, redop, ROOT),
            "broadcast": partial(comm.Bcast, passes, ROOT),
            "all_gather": partial(comm.Allgather, passes, gets),
            "gather": partial(comm.Gather, passes, gets, ROOT),
            "scatter": partial(comm.Scatter, passes, gets, ROOT),
            "reduce_scatter": partial(comm.Reduce_scatter_block, passes, gets, redop),
            "all_to_all": partial(comm.Alltoall, passes, gets),
            "barrier": comm.Barrier,
        }
        return calls[case.collective]

    version = f"{vendor} {'.'.join(map(str, numbers))}"
    return Driver(rank, size, version, comm.Barrier, mpi.Finalize, lambda kind: NUMPY_ARRAYS, bind)


# Each starts an engine from the launcher's environment; every rank must call.
DRIVERS: dict[str, Callable[[], Driver]] = {
    "fastdist": open_fastdist,
    "fastdist_cuda": lambda: open_fastdist(Gpu(int(os.environ["RANK"]))),
    "fastdist_torch": partial(
        _open_torch, "fastdist", f"fastdist {fastdist.__version__} through torch.distributed"
    ),
    "gloo": partial(_open_torch, "gloo", "gloo of torch {}"),
    "mpi": _open_mpi,
    "torch_nccl": partial(_open_torch, "nccl", "torch.distributed {}"),
}
