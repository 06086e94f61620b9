"""Replicas on the devices of several processes, on one machine or many."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from fastdist.cluster import ClusterResolver, TFConfigClusterResolver, detect_launch
from fastdist.collectives.communicator import Communicator
from fastdist.collectives.init import init
from fastdist.errors import ClusterConfigError
from fastdist.replicas.devices import every_device, physical_device
from fastdist.strategies.communicators import worker_links
from fastdist.strategies.options import CommunicationOptions
from fastdist.strategies.replicated import LinkedStrategy


class MultiWorkerMirroredStrategy(LinkedStrategy):
    """Trains on all workers' devices at once (tf.distribute.MultiWorkerMirroredStrategy).

    Every worker is a process that runs the same script; all must have as many devices. Initial
    values come from the chief. Where there is no cluster it is a job of one worker.

    Args:
        cluster_resolver: says who the workers are; by default TF_CONFIG, or what the launcher
            (torchrun, `fastdist run`, mpiexec, srun) has put into the environment.
        devices: of this worker's replicas. By default every GPU, or one CPU; where a launcher
            started several processes on this machine, one GPU for each.
        options: how to communicate.

    Raises:
        ClusterConfigError: the cluster makes no sense, this task does not train (it is an evaluator
            or a parameter server), or workers have different numbers of devices.
    """

    def __init__(
        self,
        cluster_resolver: ClusterResolver | None = None,
        *,
        devices: Sequence[str | torch.device] | None = None,
        options: CommunicationOptions | None = None,
    ) -> None:
        options = options or CommunicationOptions()
        if devices is not None and not devices:
            raise ValueError("devices must not be empty; None takes what the machine has")
        world = _workers(cluster_resolver, options.timeout_s)
        given = _default_devices() if devices is None else list(map(torch.device, devices))
        own = [physical_device(device) for device in given]
        super().__init__(
            own,
            lambda: worker_links(world, len(own), options),
            worker=world.rank,
            workers=world.world_size,
            options=options,
        )


def _workers(resolver: ClusterResolver | None, timeout_s: float | None) -> Communicator:
    if resolver is None:
        if not TFConfigClusterResolver.is_available(os.environ):
            return init(timeout=timeout_s)  # by the launcher
        resolver = TFConfigClusterResolver()
    if resolver.rank is None:
        raise ClusterConfigError(
            f"{resolver.task_type} {resolver.task_id} takes no part in training; only the chief "
            f"and workers make a MultiWorkerMirroredStrategy, in {resolver.cluster_spec()!r}"
        )
    world = init(cluster=resolver, timeout=timeout_s)
    if (world.rank, world.world_size) != (resolver.rank, resolver.world_size):
        raise ClusterConfigError(
            f"fastdist.init() was called before and found rank {world.rank} of "
            f"{world.world_size}; the cluster has this task as rank {resolver.rank} of "
            f"{resolver.world_size}"
        )
    return world


def _default_devices() -> list[torch.device]:
    every = every_device()
    launch = detect_launch()
    if launch is None or launch.local_world_size == 1:
        return every
    return [every[launch.local_rank % len(every)]]
