"""Cores, memory and limits of this machine that matter to collectives."""

from __future__ import annotations

import os
import platform
import resource
from pathlib import Path

from fastdist.cli.doctor.facts import Fact, State, format_bytes
from fastdist.processes.cgroups import Cgroups, read_text
from fastdist.processes.proc import processor

_SHMEM_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")


def machine_section(cgroups: Cgroups | None = None) -> list[Fact]:
    """Return the processor, and this process's share of it."""
    quota = (cgroups or Cgroups()).cpu_limit()
    usable, present = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    quota_text = "none" if quota is None else f"{quota:g} cores' worth of time"
    return [
        Fact("processor", processor(), processor()),
        Fact("cores", usable, f"{usable} usable of {present}"),
        Fact("cpu_quota", quota, quota_text),
        Fact("kernel", platform.release(), platform.release()),
    ]


def memory_section(cgroups: Cgroups | None = None) -> list[Fact]:
    """Report memory, and limits for shared memory."""
    limit = (cgroups or Cgroups()).memory_limit_bytes()
    total, available = _memory_bytes("MemTotal"), _memory_bytes("MemAvailable")
    memory = f"{format_bytes(total)}, {format_bytes(available)} available"
    huge_pages = _huge_pages()
    return [
        Fact("memory", total, memory),
        Fact("cgroup_limit", limit, "none" if limit is None else format_bytes(limit)),
        _address_space(total),
        _open_files(),
        Fact("shared_huge_pages", huge_pages, huge_pages or "not in this kernel"),
    ]


def _address_space(memory_bytes: int) -> Fact:
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return Fact("address_space_limit", None, "none")
    # Each rank maps a window of the size of the memory for every rank; most pages stay untouched.
    needed = 2 * (1 << (memory_bytes - 1).bit_length())
    if limit >= needed:
        return Fact("address_space_limit", limit, format_bytes(limit))
    text = f"{format_bytes(limit)}; 2 ranks need {format_bytes(needed)}: ulimit -v unlimited"
    return Fact("address_space_limit", limit, text, State.BAD)


def _open_files() -> Fact:
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return Fact("open_files_limit", None, "none")
    return Fact("open_files_limit", limit, f"{limit} (one per rank is needed)")


def _huge_pages() -> str | None:
    """Return the kernel's policy for huge pages of shared memory, which is in brackets."""
    chosen = [word for word in read_text(_SHMEM_HUGE_PAGES).split() if word.startswith("[")]
    return chosen[0].strip("[]") if chosen else None


def _memory_bytes(name: str) -> int:
    for line in read_text(Path("/proc/meminfo")).splitlines():
        if line.startswith(f"{name}:"):
            return 1024 * int(line.split()[1])
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
