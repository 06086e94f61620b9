"""Drives torch.distributed's NCCL."""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from fastdist.cli.bench.arrays import Array, ArrayLibrary
from fastdist.cli.bench.cases import Case
from fastdist.cli.bench.driver import Call
from fastdist.cli.bench.gpu import Gpu, gpu_of_rank, nccl_version_text, prepare_for_sharing
from fastdist.cli.bench.torch_calls import TorchCalls


class TorchNcclDriver:
    """Calls go to torch.distributed's default process group, in the order of torch's stream."""

    def __init__(self, folder: Path) -> None:
        torch: Any = importlib.import_module("torch")
        self._dist: Any = importlib.import_module("torch.distributed")
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        major, minor, patch = torch.cuda.nccl.version()[:3]
        nccl_version = 10000 * major + 100 * minor + patch
        prepare_for_sharing(nccl_version, world_size)
        self.gpu = Gpu(gpu_of_rank(rank))
        self._dist.init_process_group(
            "nccl",
            init_method=f"file://{folder / 'torch.store'}",
            rank=rank,
            world_size=world_size,
            device_id=torch.device("cuda", torch.cuda.current_device()),
        )
        self.rank: int = rank
        self.world_size: int = world_size
        self.version = (
            f"torch.distributed {torch.__version__.partition('+')[0]} with NCCL "
            f"{nccl_version_text(nccl_version)}"
        )
        self._calls = TorchCalls(self.gpu.arrays)
        self._flag = self.gpu.arrays.make((1,), "int32")

    def arrays(self, kind: str) -> ArrayLibrary:
        return self.gpu.arrays

    def barrier_call(self) -> Call:
        return partial(self._dist.all_reduce, self._flag)

    def bind(self, case: Case, passes: Array | None, gets: Array | None) -> Call:
        if case.collective == "send_recv":
            return self._ring(passes, gets)
        return self._calls.bind(case, passes, gets)

    def _ring(self, passes: Array | None, gets: Array | None) -> Call:
        """Send and receive in one batch, as torch recommends."""
        dist = self._dist
        to, source = (self.rank + 1) % self.world_size, (self.rank - 1) % self.world_size
        pair = [dist.P2POp(dist.isend, passes, to), dist.P2POp(dist.irecv, gets, source)]

        def ring() -> None:
            for work in dist.batch_isend_irecv(pair):
                work.wait()

        return ring

    def bind_list(self, case: Case, variant: str, arrays: Sequence[Array]) -> Call:
        return self._calls.bind_list(case, variant, arrays, overlap=True)

    def close(self) -> None:
        self.gpu.synchronize()
        self._dist.destroy_process_group()
