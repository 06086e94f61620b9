"""A rank of the bench whose GPU is a `StreamDevice`: fastdist's engine for CPUs works in its order.

Started as the bench's own worker is; stands in for the drivers of GPUs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import fastdist
from fastdist.cli.bench import fastdist_driver, torch_driver
from fastdist.cli.bench.arrays import ArrayLibrary
from fastdist.cli.bench.cases import Case
from fastdist.cli.bench.fastdist_driver import FastdistCalls
from fastdist.cli.bench.worker import main
from stream_device import StreamDevice

Call = Callable[[], object]


class StreamDriver(FastdistCalls):
    """A call enqueues its work; where `is_capturable` is False, capturing a call raises."""

    def __init__(self, is_capturable: bool) -> None:
        super().__init__(fastdist.init())
        self.gpu = StreamDevice()
        self.version = "streams on CPUs"
        self._is_capturable = is_capturable
        flag = self.gpu.arrays.make((1,), "int32")
        self.barrier = partial(self.gpu.enqueue, partial(self._comm.all_reduce, flag))

    def arrays(self, kind: str) -> ArrayLibrary:
        return self.gpu.arrays

    def bind(self, case: Case, passes: Any, gets: Any) -> Call:
        return self._enqueued(super().bind(case, passes, gets))

    def bind_list(self, case: Case, variant: str, arrays: Sequence[Any]) -> Call:
        return self._enqueued(super().bind_list(case, variant, arrays))

    def _enqueued(self, call: Call) -> Call:
        def enqueue() -> None:
            if self.gpu.is_capturing and not self._is_capturable:
                raise RuntimeError("this is not captured")
            self.gpu.enqueue(call)

        return enqueue

    def close(self) -> None:
        self.gpu.synchronize()
        self._comm.close()


if __name__ == "__main__":
    fastdist_driver.FastdistCudaDriver = partial(StreamDriver, True)  # type: ignore[misc]
    torch_driver.TorchNcclDriver = partial(StreamDriver, False)  # type: ignore[misc]
    raise SystemExit(main())
