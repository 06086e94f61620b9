"""Drives DeepSpeed's all_reduce through shared memory, which it has for inference on CPUs."""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from fastdist.cli.bench.arrays import Array, UnsupportedCaseError
from fastdist.cli.bench.buckets import one_by_one
from fastdist.cli.bench.cases import Case
from fastdist.cli.bench.driver import Call
from fastdist.cli.bench.torch_host import TorchHostDriver


class DeepSpeedDriver(TorchHostDriver):
    """Calls go to DeepSpeed's kernel, which is compiled when first used."""

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

    def close(self) -> None:
        """Leave, and remove this job's memory, which the kernel leaves behind."""
        super().close()
        for path in Path("/dev/shm").glob(f"deepspeed_*{self._folder.name}*"):
            path.unlink(missing_ok=True)

    def _require_sum(self, case: Case) -> None:
        known = ("float32", "float16", "bfloat16")
        if (case.collective, case.redop) != ("all_reduce", "sum") or case.dtype not in known:
            raise UnsupportedCaseError(f"DeepSpeed's kernel has sums of {', '.join(known)} alone")
