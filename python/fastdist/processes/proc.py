"""Reads what Linux tells of processes and of the processor in /proc."""

import os
from collections.abc import Iterator


def stat(process: int | str) -> list[str]:
    """Return the fields of /proc/PROCESS/stat after the program's name: state, parent, …"""
    with open(f"/proc/{process}/stat", encoding="utf-8", errors="replace") as file:
        return file.read().rpartition(")")[2].split()


def start_ticks(process: int | str) -> int:
    """Return the start of a process, in clock ticks since boot; raises as `stat`."""
    return int(stat(process)[19])


def ancestors(process: int | str) -> Iterator[int]:
    """Yield the processes from which a process descends, its parent first; raises as `stat`."""
    while (process := int(stat(process)[1])) > 0:
        yield process


def processor() -> str:
    """Return the model of the processor."""
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        for line in file:
            name, _, value = line.partition(":")
            if name.strip() in ("model name", "Model"):
                return value.strip()
    return os.uname().machine
