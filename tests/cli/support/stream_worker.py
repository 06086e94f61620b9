"""A rank of the bench whose GPU is a `StreamDevice`: fastdist's engine for CPUs works in its order.

Started as the bench's own worker is; stands in for the drivers of GPUs.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from fastdist.cli.bench.cases import Case
from fastdist.cli.bench.drivers import DRIVERS, Call, Driver, open_fastdist
from fastdist.cli.bench.worker import main
from stream_device import StreamDevice


def open_stream(is_capturable: bool) -> Driver:
    """Start fastdist; a call enqueues its work, and raises in a capture unless `is_capturable`."""
    driver, gpu = open_fastdist(), StreamDevice()
    flag = gpu.arrays.make((1,), "int32")
    all_reduce = driver.bind(Case("all_reduce", 4, 1, "int32", "sum", "numpy"), flag, None)

    def bind(case: Case, passes: Any, gets: Any) -> Call:
        call = driver.bind(case, passes, gets)

        def enqueue() -> None:
            if gpu.is_capturing and not is_capturable:
                raise RuntimeError("this is not captured")
            gpu.enqueue(call)

        return enqueue

    return replace(
        driver,
        version="streams on CPUs",
        barrier=partial(gpu.enqueue, all_reduce),
        arrays=lambda kind: gpu.arrays,
        bind=bind,
        gpu=gpu,
    )


if __name__ == "__main__":
    DRIVERS["fastdist_cuda"] = partial(open_stream, True)
    DRIVERS["torch_nccl"] = partial(open_stream, False)
    raise SystemExit(main())
