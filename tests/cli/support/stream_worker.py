"""A rank of the bench whose GPU is a `StreamDevice`: fastdist's engine for CPUs works in its order.

Started as the bench's own worker is; stands in for the drivers of GPUs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from fastdist.cli.bench.cases import Case
from fastdist.cli.bench.drivers import DRIVERS, ArrayLibrary, FastdistDriver
from fastdist.cli.bench.worker import main
from stream_device import StreamDevice

Call = Callable[[], object]


class StreamDriver(FastdistDriver):
    """A call enqueues its work; where `is_capturable` is False, capturing a call raises."""

    def __init__(self, is_capturable: bool) -> None:
        super().__init__()
        self.gpu = StreamDevice()
        self.version = "streams on CPUs"
        self._is_capturable = is_capturable
        flag = self.gpu.arrays.make((1,), "int32")
        self.barrier = partial(self.gpu.enqueue, partial(self._comm.all_reduce, flag))

    def arrays(self, kind: str) -> ArrayLibrary:
        return self.gpu.arrays

    def bind(self, case: Case, passes: Any, gets: Any) -> Call:
        call = super().bind(case, passes, gets)

        def enqueue() -> None:
            if self.gpu.is_capturing and not self._is_capturable:
                raise RuntimeError("this is not captured")
            self.gpu.enqueue(call)

        return enqueue


if __name__ == "__main__":
    DRIVERS["fastdist_cuda"] = partial(StreamDriver, True)
    DRIVERS["torch_nccl"] = partial(StreamDriver, False)
    raise SystemExit(main())
