"""Drives torch.distributed with Gloo, fastdist or NCCL, and DeepSpeed; always torch tensors."""

from __future__ import annotations

import importlib
import os
import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import fastdist  # registers the backend
import fastdist._core as _core
from fastdist.cli.bench.arrays import Array, ArrayLibrary, UnsupportedCaseError, torch_arrays
from fastdist.cli.bench.cases import Case
from fastdist.cli.bench.collectives import ROOT
from fastdist.cli.bench.driver import (
    Bucket,
    Call,
    Driver,
    buckets_of,
    one_after_the_other,
    one_by_one,
)
from fastdist.cli.bench.gpu import Gpu, gpu_of_rank
from fastdist.collectives.engines.nccl_library import allow_sharing


class TorchCalls(Driver):
    """Binds tensors to calls of the default process group; the base of torch's drivers.

    With `overlap`, buckets are copied while others are reduced, as in DDP, and `send_recv` is one
    batch, as torch recommends for NCCL.
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

    def barrier_call(self) -> Call:
        if self.gpu is None:
            barrier: Call = self._dist.barrier
            return barrier
        return partial(self._dist.all_reduce, self._library.make((1,), "int32"))

    def _redop(self, case: Case) -> Any:
        names = {"": "SUM", "sum": "SUM", "mean": "AVG", "prod": "PRODUCT"}
        return getattr(self._dist.ReduceOp, names.get(case.redop, case.redop.upper()))

    def bind(self, case: Case, passes: Array | None, gets: Array | None) -> Call:
        dist, redop = self._dist, self._redop(case)
        if case.collective == "send_recv":
            if self._overlap:
                return self._batched_ring(passes, gets)
            return self.ring_call(dist.send, dist.recv, passes, gets)
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

    def _batched_ring(self, passes: Array, gets: Array) -> Call:
        dist = self._dist
        to, source = self.ring_neighbors()
        pair = [dist.P2POp(dist.isend, passes, to), dist.P2POp(dist.irecv, gets, source)]

        def ring() -> None:
            for work in dist.batch_isend_irecv(pair):
                work.wait()

        return ring

    def bind_list(self, case: Case, variant: str, arrays: Sequence[Array]) -> Call:
        all_reduce, redop = self._dist.all_reduce, self._redop(case)
        if variant == "coalesced":
            return partial(self._dist.all_reduce_coalesced, list(arrays), redop)
        if variant == "one by one":
            return one_by_one(arrays, lambda array: all_reduce(array, redop))
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

    def close(self) -> None:
        if self.gpu is not None:
            self.gpu.synchronize()
        self._dist.destroy_process_group()


def _init_process_group(backend: str, store: Path, **options: Any) -> None:
    dist: Any = importlib.import_module("torch.distributed")
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group(
        backend, init_method=f"file://{store}", rank=rank, world_size=world_size, **options
    )


class TorchHostDriver(TorchCalls):
    """Calls go to torch.distributed's default process group on the CPU."""

    def __init__(self, backend: str, folder: Path) -> None:
        torch: Any = importlib.import_module("torch")
        torch.set_num_threads(1)
        _init_process_group(backend, folder / f"{type(self).__name__}.{backend}.store")
        super().__init__(torch_arrays(), overlap=False)
        self.version = f"{backend} of torch {torch.__version__.partition('+')[0]}"
        if backend == "fastdist":
            self.version = f"fastdist {fastdist.__version__} through torch.distributed"


GlooDriver = partial(TorchHostDriver, "gloo")
FastdistTorchDriver = partial(TorchHostDriver, "fastdist")


class TorchNcclDriver(TorchCalls):
    """Calls go to torch.distributed's default process group, in the order of torch's stream."""

    def __init__(self, folder: Path) -> None:
        torch: Any = importlib.import_module("torch")
        major, minor, patch = torch.cuda.nccl.version()[:3]
        if int(os.environ["WORLD_SIZE"]) > len(_core.cuda_devices()):
            allow_sharing(10000 * major + 100 * minor + patch)  # as fastdist's engine does
        self.gpu = Gpu(gpu_of_rank(int(os.environ["RANK"])))
        device = torch.device("cuda", torch.cuda.current_device())
        _init_process_group("nccl", folder / "nccl.store", device_id=device)
        super().__init__(self.gpu.arrays, overlap=True)
        self.version = (
            f"torch.distributed {torch.__version__.partition('+')[0]} with NCCL "
            f"{major}.{minor}.{patch}"
        )


class DeepSpeedDriver(TorchHostDriver):
    """Calls go to DeepSpeed's all_reduce through shared memory, for inference on CPUs.

    Its kernel is compiled when first used.
    """

    def __init__(self, folder: Path) -> None:
        # The kernel names its memory by these, and needs no such address.
        os.environ |= {"MASTER_ADDR": folder.name, "MASTER_PORT": "0"}
        os.environ["LOCAL_SIZE"] = os.environ["WORLD_SIZE"]
        self._folder = folder
        super().__init__("gloo", folder)
        deepspeed: Any = importlib.import_module("deepspeed")
        builders: Any = importlib.import_module("deepspeed.ops.op_builder.cpu.comm")
        builders.ShareMemCommBuilder().load().initialize(self.world_size, self.rank)
        torch: Any = importlib.import_module("torch")
        self._all_reduce = torch.ops.deepspeed.inference_all_reduce_
        self.version = f"DeepSpeed {deepspeed.__version__}, its shared memory"

    def bind(self, case: Case, passes: Array | None, gets: Array | None) -> Call:
        self._require_sum(case)
        return partial(self._all_reduce, passes)

    def bind_list(self, case: Case, variant: str, arrays: Sequence[Array]) -> Call:
        self._require_sum(case)
        return one_by_one(arrays, self._all_reduce)

    def _require_sum(self, case: Case) -> None:
        known = ("float32", "float16", "bfloat16")
        if (case.collective, case.redop) != ("all_reduce", "sum") or case.dtype not in known:
            raise UnsupportedCaseError(f"DeepSpeed's kernel has sums of {', '.join(known)} alone")

    def close(self) -> None:
        """Leave, and remove this job's memory, which the kernel leaves behind."""
        super().close()
        for path in Path("/dev/shm").glob(f"deepspeed_*{self._folder.name}*"):
            path.unlink(missing_ok=True)
