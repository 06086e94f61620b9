"""The limit of open files of this process, which also limits its connections."""

from __future__ import annotations

import resource

_ENOUGH = 1 << 16


def allow_open_files(needed: int, reason: str) -> None:
    """Raise this process's limit to what the system permits.

    Args:
        needed: number of open files.
        reason: what needs them, for the message.

    Raises:
        OSError: the system permits fewer.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = max(needed, _ENOUGH) if hard == resource.RLIM_INFINITY else hard
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(max(needed, _ENOUGH), most), hard))
    if needed > most:
        raise OSError(
            f"{reason} need about {needed} open files, the limit is {hard}: see ulimit -n"
        )
