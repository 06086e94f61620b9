"""Replicas with a copy of every variable each, on one machine or on several workers."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NoReturn

import torch

from fastdist.cluster import ClusterResolver, TFConfigClusterResolver, detect_launch
from fastdist.cluster.launch import Launch, note_launch
from fastdist.cluster.replicas import started_replica
from fastdist.cluster.roster import roster_place
from fastdist.collectives.communicator import Communicator
from fastdist.collectives.hints import refuse_keywords
from fastdist.collectives.init import coordinator_of_launch, init
from fastdist.errors import ClusterConfigError
from fastdist.replicas.devices import every_device, usable_devices, use_own_cores
from fastdist.replicas.starting import join_replicas
from fastdist.strategies.replicated import ReplicatedStrategy
from fastdist.training.communicators import CommunicationOptions


class MirroredStrategy(ReplicatedStrategy):
    """Trains on all devices of this machine at once (tf.distribute.MirroredStrategy).

    Every replica is a process. Under `fastdist run` or another launcher, each process that it
    starts is a replica. Without a launcher, a strategy of several devices starts the program once
    more for each additional replica. These replicas run the program from its beginning, show output
    only if they fail, and end with this process.

    Args:
        devices: devices of the replicas; None: those of the replicas that run already, or else
            every GPU, or else one CPU. `["cpu:0", "cpu:1"]` makes two replicas on the CPU. Under a
            launcher: one device per process, or one device for all processes.
        options: communication options.

    Raises:
        ClusterConfigError: the launcher started another number of processes than there are
            devices, or processes on several machines; or the program cannot be started again (a
            notebook: see `fastdist.launch`), or has replicas on other devices.
        ValueError: torch cannot use a device.

    Examples:
        >>> import fastdist as fd
        >>> strategy = fd.MirroredStrategy(["cpu:0"])  # ["cpu:0", "cpu:1"]: two replicas
        >>> strategy.num_replicas_in_sync
        1
    """

    def __init__(
        self,
        devices: Sequence[str | torch.device] | None = None,
        *,
        options: CommunicationOptions | None = None,
        **unknown: NoReturn,
    ) -> None:
        refuse_keywords("MirroredStrategy", unknown)
        options = options or CommunicationOptions()
        given = None if devices is None else usable_devices(devices, "devices")
        device, world = join_replicas_of_machine("MirroredStrategy", given, options)
        super().__init__(device, world, options=options)


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
        refuse_keywords("MultiWorkerMirroredStrategy", unknown)
        has_cluster = cluster_resolver is not None or roster_place() is not None
        if not has_cluster and TFConfigClusterResolver.is_available(os.environ):
            cluster_resolver = TFConfigClusterResolver()
        options = options or CommunicationOptions()
        given = None if devices is None else usable_devices(devices, "devices")
        name = "MultiWorkerMirroredStrategy"
        device, world = join_replicas_of_job(name, given, options, cluster_resolver)
        super().__init__(device, world, options=options)


def join_replicas_of_machine(
    strategy: str, given: Sequence[torch.device] | None, options: CommunicationOptions
) -> tuple[torch.device, Communicator | None]:
    """Return this process's device and the communicator of all replicas of one machine."""
    started, launch = started_replica(), detect_launch()
    if roster_place() is None:
        if started is not None:
            given = given or usable_devices(started.devices, "devices")
        elif launch is not None and launch.local_world_size != launch.world_size:
            raise ClusterConfigError(
                f"{strategy} is for one machine; {launch.launcher} started {launch.world_size} "
                f"processes, {launch.local_world_size} of them on this machine. Use "
                "MultiWorkerMirroredStrategy"
            )
        elif launch is None or launch.world_size == 1:
            given = given or every_device()
            if len(given) == 1:
                return given[0], None
    return join_replicas_of_job(strategy, given, options, None)


def join_replicas_of_job(
    strategy: str,
    given: Sequence[torch.device] | None,
    options: CommunicationOptions,
    resolver: ClusterResolver | None,
) -> tuple[torch.device, Communicator]:
    """Return this process's device and the communicator of all replicas."""
    timeout_s = options.timeout_s
    own = given or every_device()
    if (elastic := roster_place()) is not None:
        return own[elastic.slot % len(own)], init(elastic=True, timeout=timeout_s)
    started, launch = started_replica(), detect_launch()
    worker, workers, coordinator = 0, 1, ""
    if started is not None:
        worker, workers, coordinator = started.worker, started.workers, started.coordinator
    elif resolver is not None:
        if resolver.rank is None:
            raise ClusterConfigError(
                f"{resolver.task_type} {resolver.task_id} takes no part in training; only the "
                f"chief and workers make a {strategy}, in {resolver.cluster_spec()!r}"
            )
        worker, workers = resolver.rank, resolver.world_size
        coordinator = resolver.coordinator_address if workers > 1 else ""
    elif launch is not None and launch.world_size > 1:
        if len(own) == 1 or launch.local_world_size > 1:
            return _device_under(launch, strategy, given), init(timeout=timeout_s)
        worker, workers, coordinator = launch.rank, launch.world_size, coordinator_of_launch(launch)
    place = 0
    if started is not None or len(own) > 1:
        place = join_replicas(strategy, own, worker, workers, coordinator).index
        use_own_cores(len(own))
    if workers == 1:
        return own[place], init(timeout=timeout_s)
    rank, size = worker * len(own) + place, workers * len(own)
    world = init(rank=rank, world_size=size, address=coordinator, timeout=timeout_s)
    note_launch(launch)  # a strategy of this machine may be made beside this one
    if (world.rank, world.world_size) != (rank, size):
        raise ClusterConfigError(
            f"an earlier fastdist.init() made this process rank {world.rank} of "
            f"{world.world_size}; in the cluster it is rank {rank} of {size}"
        )
    return own[place], world


def _device_under(
    launch: Launch, strategy: str, given: Sequence[torch.device] | None
) -> torch.device:
    """Return the device of a process that is one replica, as all of its launcher are."""
    if given is not None and len(given) not in (1, launch.local_world_size):
        raise ClusterConfigError(
            f"{strategy} got {len(given)} devices; {launch.launcher} started "
            f"{launch.local_world_size} processes on this machine, each of which is one replica: "
            "give as many devices, or none"
        )
    chosen = given or every_device()
    return chosen[launch.local_rank % len(chosen)]
