"""Packing of ResNet-50's 161 gradients into buckets, as a share of a copy's speed.

    python benchmarks/gpu/packing.py

One rank, so NCCL moves nothing, and a list's time is that of packing and unpacking. Prints a line
of JSON: the speed of a copy and of the kernels, in GB/s of bytes read and written, from a
profiler's time for each kernel, and the microseconds of a whole call, from events. Needs a GPU.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable

import fastdist as fd
import torch
from fastdist.cli.bench.cases import GRADIENT_SHAPES
from torch.profiler import ProfilerActivity, profile

CALLS = 30


def median_us(call: Callable[[], object]) -> float:
    """Return the time between events around single calls."""
    pairs = []
    for _ in range(CALLS):
        pair = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        torch.cuda._sleep(200_000)  # so that the device never waits for the host
        pair[0].record()
        call()
        pair[1].record()
        pairs.append(pair)
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) * 1e3 for start, end in pairs)


def main() -> None:
    """Measure."""
    comm = fd.init()
    grads = [torch.randn(shape, device="cuda") for shape in GRADIENT_SHAPES["resnet50"]]
    nbytes = sum(grad.numel() * grad.element_size() for grad in grads)
    expected = [grad.clone() for grad in grads]
    flat, copied = torch.randn(nbytes // 4, device="cuda"), torch.empty(nbytes // 4, device="cuda")
    figures: dict[str, float] = {"bytes": nbytes}
    for name, call in {
        "copy": lambda: copied.copy_(flat),
        "list": lambda: comm.all_reduce(grads, op="sum"),
        "list in bf16": lambda: comm.all_reduce(grads, op="sum", compress="bf16"),
    }.items():
        for _ in range(5):
            call()
        figures[f"{name}_us"] = round(median_us(call), 1)
        if name == "list":
            assert all(map(torch.equal, grads, expected)), "a sum over one rank changes nothing"
            with profile(activities=[ProfilerActivity.CUDA]) as seen:
                for _ in range(CALLS):
                    call()
                torch.cuda.synchronize()
            kernels = [e for e in seen.key_averages() if "kernel" in e.key.lower()]
            for kernel in kernels:
                print(json.dumps({"kernel": kernel.key[:100], "launches": kernel.count,
                                  "us": round(kernel.device_time_total / CALLS, 1)}))  # fmt: skip
            moved = sum(kernel.device_time_total for kernel in kernels if "move" in kernel.key)
            if moved:
                figures["kernels_gb_per_s"] = round(4 * nbytes * CALLS / moved / 1e3, 1)
    figures["copy_gb_per_s"] = round(2 * nbytes / figures["copy_us"] / 1e3, 1)
    if "kernels_gb_per_s" in figures:
        figures["share_of_a_copy"] = round(
            figures["kernels_gb_per_s"] / figures["copy_gb_per_s"], 3
        )
    print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    main()
