"""Facts about this machine, to interpret the figures."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

import fastdist._core as _core
from fastdist.cli.sizes import format_size, parse_size
from fastdist.processes.proc import processor

_CPUS = Path("/sys/devices/system/cpu")
_PROGRAM_S = 30


def usable_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def output_of(*command: str) -> str:
    """Return what a program writes to stdout; empty if it fails, or does not end within 30 s."""
    try:
        return subprocess.run(
            command, capture_output=True, text=True, timeout=_PROGRAM_S, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def largest_cache_bytes() -> int:
    """Return the size of the largest cache of core 0; 0 if the kernel does not tell."""
    sizes = [parse_size(path.read_text()) for path in _CPUS.glob("cpu0/cache/index*/size")]
    return max(sizes, default=0)


def total_cache_bytes(cpus: Path = _CPUS) -> int:
    """Return the total size of the usable cores' last-level caches; 0 if unknown."""
    sizes: dict[str, int] = {}  # by the cores that share a cache
    for core in os.sched_getaffinity(0):
        caches = list((cpus / f"cpu{core}" / "cache").glob("index*"))
        if caches:
            last = max(caches, key=lambda cache: int((cache / "level").read_text()))
            sharers = (last / "shared_cpu_list").read_text()
            sizes[sharers] = parse_size((last / "size").read_text())
    return sum(sizes.values())


def machine_facts() -> dict[str, str]:
    """Return processor, memory, kernel and versions, by name."""
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    facts = {
        "processor": processor(),
        "cores": str(usable_cores()),
        "cache": format_size(largest_cache_bytes()),
        "memory": f"{memory_bytes / 2**30:.0f} GiB",
        "kernel": platform.release(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "date": datetime.now(UTC).date().isoformat(),
    }
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        facts["torch"] = importlib.metadata.version("torch")
    return facts


def gpu_facts() -> dict[str, str]:
    """Return the GPUs, and the versions of CUDA of the driver and of this build, by name."""
    versions = (_core.cuda_driver_version(), _core.cuda_runtime_version())
    driver, runtime = (f"{version // 1000}.{version // 10 % 100}" for version in versions)
    gpus = [f"{gpu.name} ({gpu.bytes / 2**30:.0f} GiB)" for gpu in _core.cuda_devices()]
    return {"gpus": ", ".join(gpus), "cuda driver": driver, "cuda runtime": runtime}
