"""The open files and the memory of a process that has many connections."""

from __future__ import annotations

import resource

import numpy as np

_ENOUGH = 1 << 16


def allow_open_files(needed: int, reason: str) -> None:
    """Raise this process's limit to what the system permits; OSError if it permits fewer."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = max(needed, _ENOUGH)
    if hard != resource.RLIM_INFINITY:
        most = min(most, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    if needed > most:
        raise OSError(
            f"{reason} need about {needed} open files, the limit is {hard}: see ulimit -n"
        )


def keep_freed_memory() -> None:
    """Make malloc reuse the memory of freed frames instead of returning it to the kernel.

    Fresh memory costs a page fault for each 4 KiB, which takes longer than receiving 4 KiB. glibc
    keeps blocks of up to the largest size that has been freed before, at most 32 MiB (mallopt(3),
    M_MMAP_THRESHOLD); other C libraries keep freed memory anyway.
    """
    np.empty(31 << 20, np.uint8)
