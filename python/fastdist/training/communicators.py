"""The communicators of replicas."""

from __future__ import annotations

import os
from dataclasses import dataclass

import numpy as np

from fastdist.cluster.launch import detect_launch
from fastdist.collectives.communicator import Communicator
from fastdist.training.options import CommunicationOptions, Overlap


@dataclass(frozen=True, slots=True)
class ReplicaCommunicators:
    """The communicators that connect a replica to the other replicas.

    Attributes:
        replicas: collectives in `run` and in cross-replica context.
        gradients: a second communicator, so that the order of gradients does not depend on other
            calls.
        overlaps: True if gradients are reduced while backward runs.
    """

    replicas: Communicator
    gradients: Communicator
    overlaps: bool

    def abort(self) -> None:
        """Leave both; replicas that wait for this replica get PeerFailureError."""
        self.replicas.abort()
        self.gradients.abort()


def connect_replicas(world: Communicator, options: CommunicationOptions) -> ReplicaCommunicators:
    """Make the communicators of all ranks of `world`. Every rank must call."""
    gradients = _copy(world, options)
    overlaps = agree_on_overlap(world, options.overlap)
    return ReplicaCommunicators(_copy(world, options), gradients, overlaps)


def agree_on_overlap(ranks: Communicator, overlap: Overlap) -> bool:
    """Return `overlap`; for "auto", if every machine has more cores than ranks.

    Every rank must call.
    """
    if overlap != "auto":
        return overlap
    launch = detect_launch()
    idle = len(os.sched_getaffinity(0)) - (1 if launch is None else launch.local_world_size)
    return bool(ranks.all_reduce(np.array([idle > 0]), "min")[0])


def _copy(world: Communicator, options: CommunicationOptions) -> Communicator:
    copy = world.subgroup(range(world.world_size))
    assert copy is not None
    return copy if options.timeout_s is None else Communicator(copy.engine, options.timeout_s)
