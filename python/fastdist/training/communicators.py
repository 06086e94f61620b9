"""The communicators of replicas, and their options (tf.distribute's CommunicationOptions)."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np

from fastdist.cluster.launch import detect_launch
from fastdist.collectives.communicator import Communicator
from fastdist.collectives.types import Compression
from fastdist.training.contributions import GradientReduction

Overlap: TypeAlias = bool | Literal["auto"]


@dataclass(frozen=True, slots=True)
class CommunicationOptions:
    """Options of the collectives that a strategy calls.

    Attributes:
        bucket_bytes: maximum total size of gradients that are reduced together.
        timeout_s: seconds to wait for other replicas; None: the communicator's default.
        compress: send gradients as "fp16", "bf16" or "fp8" (on CPUs only); None: exact.
        overlap: True: reduce gradients during backward. False: in one call after backward, which is
            faster if replicas use all cores. "auto": True on GPUs, and on the CPU if every machine
            has more cores than replicas. The same on all replicas. A sharded optimizer sends some
            parameters while it steps others, if True, or if "auto" and cores are idle.
        gradient_reduction: "mean" over the examples of the global batch, so that replicas train
            as one device would, or "sum" over replicas (tf.distribute's convention; see
            `fastdist.nn.compute_average_loss`).
        shard_optimizer: True: each replica keeps the optimizers' states of the parameters that it
            owns, and steps for these. `state_dict` of an optimizer is then a call that every
            replica must make.

    Examples:
        >>> import fastdist as fd
        >>> options = fd.CommunicationOptions(compress="bf16", timeout_s=60)
        >>> strategy = fd.MirroredStrategy(["cpu:0"], options=options)
    """

    bucket_bytes: int = 8 << 20
    timeout_s: float | None = None
    compress: Compression | None = None
    overlap: Overlap = "auto"
    gradient_reduction: GradientReduction = "mean"
    shard_optimizer: bool = False

    def __post_init__(self) -> None:
        if self.bucket_bytes <= 0:
            raise ValueError(f"bucket_bytes must be positive, got {self.bucket_bytes}")
        if self.timeout_s is not None and not self.timeout_s > 0:
            raise ValueError(f"timeout_s must be positive, got {self.timeout_s}")
        if self.compress not in (None, "fp16", "bf16", "fp8"):
            raise ValueError(f'compress must be None, "fp16", "bf16" or "fp8", got {self.compress}')
        if self.overlap not in (True, False, "auto"):
            raise ValueError(f'overlap must be True, False or "auto", got {self.overlap!r}')
        if self.gradient_reduction not in ("mean", "sum"):
            raise ValueError(
                f'gradient_reduction must be "mean" or "sum", got {self.gradient_reduction!r}'
            )


@dataclass(frozen=True, slots=True)
class ReplicaCommunicators:
    """The communicators that connect a replica to the other replicas."""

    replicas: Communicator  # for collectives in `run` and in cross-replica context
    gradients: Communicator  # their order must not depend on other calls
    overlaps: bool  # gradients are reduced while backward runs

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
    """Return `overlap`; for "auto", if every machine has more cores than ranks; a collective."""
    if overlap != "auto":
        return overlap
    launch = detect_launch()
    idle = len(os.sched_getaffinity(0)) - (1 if launch is None else launch.local_world_size)
    return bool(ranks.all_reduce(np.array([idle > 0]), "min")[0])


def _copy(world: Communicator, options: CommunicationOptions) -> Communicator:
    copy = world.subgroup(range(world.world_size))
    assert copy is not None
    return copy if options.timeout_s is None else Communicator(copy.engine, options.timeout_s)
