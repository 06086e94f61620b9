"""Tells whether this process is the job's chief, before anything has communicated."""

from __future__ import annotations

import os

import fastdist.cluster as cluster
from fastdist.cluster.replicas import started_replica
from fastdist.cluster.roster import roster_place
from fastdist.collectives.init import default_communicator, has_communicator


def is_chief() -> bool:
    """Return True in one process of the job: the one for work that is done once.

    Works before any strategy or communicator is made, and communicates with nobody. So it guards
    what a program does at its top, which each replica repeats: folders, logs, downloads. Afterwards
    it agrees with `strategy.is_chief`.

    Raises:
        ClusterConfigError: the variables of the launcher, or TF_CONFIG, are invalid.

    Examples:
        >>> import fastdist as fd
        >>> fd.is_chief()  # alone
        True
    """
    replica = started_replica()
    if has_communicator():
        return default_communicator().rank == 0
    if (place := roster_place()) is not None:
        return (place.machine, place.slot) == (0, 0)
    if replica is not None:
        return replica.rank == 0
    if os.environ.get("TF_CONFIG", "").strip():
        return cluster.TFConfigClusterResolver().is_chief
    launch = cluster.detect_launch()
    return launch is None or launch.rank == 0
