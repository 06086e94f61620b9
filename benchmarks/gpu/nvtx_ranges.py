"""Checks that NVIDIA's profiler sees calls as NVTX ranges: profiles only the kernels inside of one.

    python benchmarks/gpu/nvtx_ranges.py

A list is packed by a kernel inside of fastdist's range "all_reduce", so the profiler finds a
kernel if it sees the range, and none otherwise. Needs a GPU and `ncu`.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

PROGRAM = """
import fastdist as fd, torch
comm = fd.init()
grads = [torch.ones(1000, device="cuda") for _ in range(8)]
for _ in range(3):
    comm.all_reduce(grads)
torch.cuda.synchronize()
"""


def main() -> None:
    """Profile the program."""
    if (ncu := shutil.which("ncu")) is None:
        raise SystemExit("ncu is not on PATH")
    ranges = {}
    for name in ("all_reduce", "no_such_range"):
        options = ["--clock-control", "none", "--nvtx", "--nvtx-include", f"fastdist@{name}/"]
        command = [ncu, *options, "--launch-count", "2", sys.executable, "-c", PROGRAM]
        done = subprocess.run(command, capture_output=True, text=True, timeout=50)
        ranges[name] = done.stdout.count("move_kernel")
        if done.returncode != 0 and "No kernels were profiled" not in done.stdout:
            raise SystemExit(done.stdout[-2000:] + done.stderr[-2000:])
    print(json.dumps({"kernels_in_ranges": ranges}), flush=True)
    if not ranges["all_reduce"] or ranges["no_such_range"]:
        raise SystemExit("the profiler does not see the ranges")


if __name__ == "__main__":
    main()
