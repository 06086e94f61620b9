"""Drives torch.distributed with Gloo, fastdist or NCCL, and DeepSpeed; always torch tensors."""

from __future__ import annotations

import importlib
import os
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import fastdist  # registers the backend
import fastdist._core as _core
from fastdist.cli.bench.cases import ROOT, Case
from fastdist.cli.bench.driver import (
    Array,
    ArrayLibrary,
    Call,
    Driver,
    UnsupportedCaseError,
    bucketed,
    torch_arrays,
)
from fastdist.cli.bench.gpu import Gpu, gpu_of_rank
from fastdist.collectives.engines.nccl_library import allow_sharing


class TorchDriver(Driver):
    """Calls go to the default process group; on a GPU, in the order of torch's stream.

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
            return partial(_each, lambda array: all_reduce(array, redop), arrays)
        begin = partial(all_reduce, op=redop, async_op=self._overlap)
        copy_all = importlib.import_module("torch")._foreach_copy_
        return bucketed(self._library, copy_all, arrays, case.dtype, begin, self._overlap)

    def close(self) -> None:
        if self.gpu is not None:
            self.gpu.synchronize()
        self._dist.destroy_process_group()


def _each(call: Callable[[Array], object], arrays: Sequence[Array]) -> None:
    for array in arrays:
        call(array)


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
        allow_sharing(10000 * major + 100 * minor + patch)  # as fastdist's engine does
    gpu = Gpu(gpu_of_rank(int(os.environ["RANK"])))
    torch.distributed.init_process_group("nccl", device_id=torch.device("cuda", gpu.device))
    version = f"torch.distributed {torch.__version__.partition('+')[0]}"
    return TorchDriver(f"{version} with NCCL {major}.{minor}.{patch}", gpu, overlap=True)


class DeepSpeedDriver(TorchDriver):
    """Calls go to DeepSpeed's all_reduce through shared memory, for inference on CPUs.

    Its kernel is compiled when first used.
    """

    def __init__(self) -> None:
        os.environ["LOCAL_SIZE"] = os.environ["WORLD_SIZE"]
        _join("gloo")
        deepspeed: Any = importlib.import_module("deepspeed")
        super().__init__(f"DeepSpeed {deepspeed.__version__}, its shared memory")
        builders: Any = importlib.import_module("deepspeed.ops.op_builder.cpu.comm")
        builders.ShareMemCommBuilder().load().initialize(self.world_size, self.rank)
        self._all_reduce: Any = importlib.import_module("torch").ops.deepspeed.inference_all_reduce_

    def bind(self, case: Case, passes: Array | None, gets: Array | None) -> Call:
        self._require_sum(case)
        return partial(self._all_reduce, passes)

    def bind_list(self, case: Case, variant: str, arrays: Sequence[Array]) -> Call:
        self._require_sum(case)
        return partial(_each, self._all_reduce, arrays)

    def _require_sum(self, case: Case) -> None:
        known = ("float32", "float16", "bfloat16")
        if (case.collective, case.redop) != ("all_reduce", "sum") or case.dtype not in known:
            raise UnsupportedCaseError(f"DeepSpeed's kernel has sums of {', '.join(known)} alone")

    def close(self) -> None:
        """Leave, and remove this job's memory, which the kernel leaves behind."""
        super().close()
        name = f"deepspeed_*_{os.getuid()}_*_{os.environ['MASTER_PORT']}_*"
        for path in Path("/dev/shm").glob(name):
            path.unlink(missing_ok=True)
