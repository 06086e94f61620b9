"""Assigns a launcher's processes to the jobs of a cluster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fastdist.cluster.spec import ClusterSpec
from fastdist.errors import ClusterConfigError


def divide_among_jobs(
    jobs: Mapping[str, int], addresses: Sequence[str | None], rank: int, reason: str
) -> tuple[ClusterSpec, str, int]:
    """Assign the first processes to the first job, the next processes to the second, and so on.

    Args:
        jobs: number of tasks of each job.
        addresses: addresses of all processes, by rank.
        rank: rank of this process.
        reason: source of the number of processes, such as "WORLD_SIZE='4'".

    Returns:
        The cluster, and this process's job and index.

    Raises:
        ClusterConfigError: the number of tasks differs from the number of processes, or the jobs
            are not a valid cluster.
    """
    if sum(jobs.values()) != len(addresses) or min(jobs.values(), default=0) < 0:
        raise ClusterConfigError(
            f"{dict(jobs)} are {sum(jobs.values())} tasks; expected {len(addresses)}, as {reason}"
        )
    cluster: dict[str, Sequence[str | None]] = {}
    place = ("", 0)
    first = 0
    for job, tasks in jobs.items():
        cluster[job] = addresses[first : first + tasks]
        if first <= rank < first + tasks:
            place = (job, rank - first)
        first += tasks
    return ClusterSpec(cluster), *place
