"""The limit of open files of this process, which also limits its connections."""

from __future__ import annotations

import resource

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
