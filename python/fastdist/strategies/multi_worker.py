"""Replicas on the devices of several workers, on one machine or many."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

import torch

from fastdist.cluster import ClusterResolver, TFConfigClusterResolver, detect_launch
from fastdist.cluster.replicas import started_replica
from fastdist.cluster.roster import roster_place
from fastdist.collectives.communicator import Communicator
from fastdist.collectives.hints import refuse_keywords
from fastdist.collectives.init import coordinator_of_launch, init
from fastdist.errors import ClusterConfigError
from fastdist.replicas.devices import every_device, usable_devices, use_own_cores
from fastdist.replicas.starting import join_replicas
from fastdist.strategies.mirrored import device_in_slot, device_under
from fastdist.strategies.replicated import ReplicatedStrategy
from fastdist.training.options import CommunicationOptions

_NAME = "MultiWorkerMirroredStrategy"


class MultiWorkerMirroredStrategy(ReplicatedStrategy):
    """Trains on all workers' devices at once (tf.distribute.MultiWorkerMirroredStrategy).

    Every worker is a process that runs the same script; all workers must have the same number of
    devices. A worker with several devices starts its program once more for each additional device,
    as MirroredStrategy does. Initial values come from the chief. Without a cluster, the job has one
    worker.

    Args:
        cluster_resolver: the description of the workers; by default TF_CONFIG, or the environment
            variables of the launcher (torchrun, `fastdist run`, mpiexec, srun).
        devices: devices of this worker's replicas. By default every GPU, or one CPU; if a launcher
            started several processes on this machine, one GPU for each process.
        options: communication options.

    Raises:
        ClusterConfigError: the cluster is invalid, this task does not train (it is an evaluator or
            a parameter server), workers have different numbers of devices, or the program cannot be
            started again.
        ValueError: torch cannot use a device.

    Examples:
        >>> import fastdist as fd
        >>> strategy = fd.MultiWorkerMirroredStrategy()  # without a cluster: one worker
        >>> strategy.num_replicas_in_sync, strategy.is_chief
        (1, True)
    """

    def __init__(
        self,
        cluster_resolver: ClusterResolver | None = None,
        *,
        devices: Sequence[str | torch.device] | None = None,
        options: CommunicationOptions | None = None,
        **unknown: NoReturn,
    ) -> None:
        refuse_keywords(_NAME, unknown)
        options = options or CommunicationOptions()
        given = None if devices is None else usable_devices(devices, "devices")
        device, world = _join(cluster_resolver, given, options.timeout_s)
        super().__init__(device, world, options=options)


@dataclass(frozen=True, slots=True)
class _Replicas:
    """The replicas of all workers, for `init`."""

    rank: int
    world_size: int
    coordinator_address: str


def _join(
    resolver: ClusterResolver | None,
    given: Sequence[torch.device] | None,
    timeout_s: float | None,
) -> tuple[torch.device, Communicator]:
    """Return this process's device and the communicator of all replicas."""
    elastic = roster_place()
    if elastic is not None:
        return device_in_slot(elastic.slot, given), init(elastic=True, timeout=timeout_s)
    started = started_replica()
    launch = detect_launch()
    if resolver is None and TFConfigClusterResolver.is_available(os.environ):
        resolver = TFConfigClusterResolver()
    own = given or every_device()
    if started is not None:
        worker, workers, coordinator = started.worker, started.workers, started.coordinator
    elif resolver is not None:
        if resolver.rank is None:
            raise ClusterConfigError(
                f"{resolver.task_type} {resolver.task_id} takes no part in training; only the "
                "chief and workers make a MultiWorkerMirroredStrategy, in "
                f"{resolver.cluster_spec()!r}"
            )
        worker, workers = resolver.rank, resolver.world_size
        coordinator = resolver.coordinator_address if workers > 1 else ""
    elif launch is None or launch.world_size == 1:
        worker, workers, coordinator = 0, 1, ""
    elif len(own) == 1 or launch.local_world_size > 1:
        return device_under(launch, _NAME, given), init(timeout=timeout_s)
    else:
        worker, workers, coordinator = launch.rank, launch.world_size, coordinator_of_launch(launch)
    place = 0
    if started is not None or len(own) > 1:
        place = join_replicas(_NAME, own, worker, workers, coordinator).index
        use_own_cores(len(own))
    rank, size = worker * len(own) + place, workers * len(own)
    if workers == 1:
        return own[place], init(timeout=timeout_s)
    world = init(cluster=_Replicas(rank, size, coordinator), timeout=timeout_s)
    if (world.rank, world.world_size) != (rank, size):
        raise ClusterConfigError(
            f"an earlier fastdist.init() made this process rank {world.rank} of "
            f"{world.world_size}; in the cluster it is rank {rank} of {size}"
        )
    return own[place], world
