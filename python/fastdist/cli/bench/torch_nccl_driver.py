"""Drives torch.distributed's NCCL."""

from __future__ import annotations

import importlib
import os
from functools import partial
from pathlib import Path
from typing import Any

import fastdist._core as _core
from fastdist.cli.bench.arrays import Array
from fastdist.cli.bench.cases import Case
from fastdist.cli.bench.driver import Call
from fastdist.cli.bench.gpu import Gpu, gpu_of_rank
from fastdist.cli.bench.torch_calls import TorchCalls
from fastdist.collectives.engines.nccl_library import allow_sharing


class TorchNcclDriver(TorchCalls):
    """Calls go to torch.distributed's default process group, in the order of torch's stream."""

    def __init__(self, folder: Path) -> None:
        torch: Any = importlib.import_module("torch")
        dist: Any = importlib.import_module("torch.distributed")
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        major, minor, patch = torch.cuda.nccl.version()[:3]
        if world_size > len(_core.cuda_devices()):
            allow_sharing(10000 * major + 100 * minor + patch)  # as fastdist's engine does
        self.gpu = Gpu(gpu_of_rank(rank))
        dist.init_process_group(
            "nccl",
            init_method=f"file://{folder / 'torch.store'}",
            rank=rank,
            world_size=world_size,
            device_id=torch.device("cuda", torch.cuda.current_device()),
        )
        super().__init__(self.gpu.arrays, overlap=True)
        self.version = (
            f"torch.distributed {torch.__version__.partition('+')[0]} with NCCL "
            f"{major}.{minor}.{patch}"
        )
        self._flag = self.gpu.arrays.make((1,), "int32")

    def barrier_call(self) -> Call:
        return partial(self._dist.all_reduce, self._flag)

    def bind(self, case: Case, passes: Array | None, gets: Array | None) -> Call:
        if case.collective == "send_recv":
            return self._ring(passes, gets)
        return super().bind(case, passes, gets)

    def _ring(self, passes: Array | None, gets: Array | None) -> Call:
        """Send and receive in one batch, as torch recommends."""
        dist = self._dist
        to, source = (self.rank + 1) % self.world_size, (self.rank - 1) % self.world_size
        pair = [dist.P2POp(dist.isend, passes, to), dist.P2POp(dist.irecv, gets, source)]

        def ring() -> None:
            for work in dist.batch_isend_irecv(pair):
                work.wait()

        return ring

    def close(self) -> None:
        self.gpu.synchronize()
        self._dist.destroy_process_group()
