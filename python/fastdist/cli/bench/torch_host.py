"""Drives torch.distributed on the CPU, with Gloo or fastdist, always with torch tensors."""

from __future__ import annotations

import importlib
import os
from functools import partial
from pathlib import Path
from typing import Any

import fastdist  # registers the backend
from fastdist.cli.bench.arrays import Array, torch_arrays
from fastdist.cli.bench.cases import Case
from fastdist.cli.bench.driver import Call, ring_call
from fastdist.cli.bench.torch_calls import TorchCalls


class TorchHostDriver(TorchCalls):
    """Calls go to torch.distributed's default process group."""

    gpu = None

    def __init__(self, backend: str, folder: Path) -> None:
        torch: Any = importlib.import_module("torch")
        dist: Any = importlib.import_module("torch.distributed")
        torch.set_num_threads(1)
        dist.init_process_group(
            backend,
            init_method=f"file://{folder / type(self).__name__}.store",
            rank=int(os.environ["RANK"]),
            world_size=int(os.environ["WORLD_SIZE"]),
        )
        super().__init__(torch_arrays(), overlap=False)
        self.version = f"{backend} of torch {torch.__version__.partition('+')[0]}"

    def barrier_call(self) -> Call:
        call: Call = self._dist.barrier
        return call

    def bind(self, case: Case, passes: Array | None, gets: Array | None) -> Call:
        if case.collective == "send_recv":
            dist = self._dist
            return ring_call(self.rank, self.world_size, dist.send, dist.recv, (passes, gets))
        return super().bind(case, passes, gets)

    def close(self) -> None:
        self._dist.destroy_process_group()


GlooDriver = partial(TorchHostDriver, "gloo")


class FastdistTorchDriver(TorchHostDriver):
    """Calls go to fastdist as the backend of torch.distributed."""

    def __init__(self, folder: Path) -> None:
        super().__init__("fastdist", folder)
        self.version = f"fastdist {fastdist.__version__} through torch.distributed"
