"""Reads the limits that control groups, of version 1 or 2, set for a process.

A limit is the minimum of the limits set from the process's group up to the root.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

_MOUNT = Path("/sys/fs/cgroup")
_MEMBERSHIPS = Path("/proc/self/cgroup")
_V1_UNLIMITED_BYTES = 1 << 60  # v1 says "no limit" with a number near 2^63


def usable_memory_bytes() -> int:
    """Return the memory that this process may use: the machine's, or its control group's limit."""
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(machine, memory_limit_bytes() or machine)


def read_text(path: Path) -> str:
    """Read a file of the kernel; return an empty string if it cannot be read."""
    try:
        return path.read_text("utf-8", "replace")
    except OSError:
        return ""


def cgroups(memberships: str, controller: str) -> Iterator[Path]:
    """Yield the folders of a process's control groups that may have a controller, memory or cpu.

    `memberships` is the text of the process's file cgroup in /proc, version 1 or 2.
    """
    for line in memberships.splitlines():
        _, controllers, name = line.split(":", 2)
        if not controllers or controller in controllers.split(","):
            # If versions 1 and 2 are both mounted, version 2 has its own folder.
            version_2 = "unified" if not controllers and (_MOUNT / "unified").is_dir() else ""
            yield _MOUNT / controllers / version_2 / name.lstrip("/")


def cpu_limit() -> float | None:
    """Return the processor time limit in cores; None without a limit."""
    limits = []
    for folder in _folders("cpu"):
        words = _words(folder / "cpu.max")  # quota and period
        if not words and (words := _words(folder / "cpu.cfs_quota_us")):
            words += _words(folder / "cpu.cfs_period_us")
        if words and words[0] not in ("max", "-1"):
            period = words[1] if len(words) > 1 else "100000"
            limits.append(int(words[0]) / int(period))
    return min(limits, default=None)


def memory_limit_bytes() -> int | None:
    """Return the memory limit of this process's group; None without a limit."""
    limits = []
    for folder in _folders("memory"):
        words = _words(folder / "memory.max") or _words(folder / "memory.limit_in_bytes")
        if words and words[0] != "max" and int(words[0]) < _V1_UNLIMITED_BYTES:
            limits.append(int(words[0]))
    return min(limits, default=None)


def _folders(controller: str) -> Iterator[Path]:
    for folder in cgroups(read_text(_MEMBERSHIPS), controller):
        yield from (f for f in (folder, *folder.parents) if f.is_relative_to(_MOUNT))


def _words(path: Path) -> list[str]:
    return read_text(path).split()
