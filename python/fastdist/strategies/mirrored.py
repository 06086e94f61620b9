"""Replicas on the devices of one machine, each with a copy of every variable."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import torch

from fastdist.cluster import detect_launch
from fastdist.cluster.launch import Launch
from fastdist.cluster.replicas import started_replica
from fastdist.cluster.roster import roster_place
from fastdist.collectives.communicator import Communicator
from fastdist.collectives.hints import refuse_keywords
from fastdist.collectives.init import init
from fastdist.errors import ClusterConfigError
from fastdist.replicas.devices import every_device, usable_devices, use_own_cores
from fastdist.replicas.starting import join_replicas
from fastdist.strategies.replicated import ReplicatedStrategy
from fastdist.training.options import CommunicationOptions


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
        device, world = replica_of_machine("MirroredStrategy", given, options)
        super().__init__(device, world, options=options)


def device_in_slot(slot: int, given: Sequence[torch.device] | None) -> torch.device:
    """Return the device of one of the processes of a launcher on this machine."""
    chosen = given or every_device()
    return chosen[slot % len(chosen)]


def device_under(
    launch: Launch, strategy: str, given: Sequence[torch.device] | None
) -> torch.device:
    """Return the device of a process that is one replica, as all of its launcher are."""
    if given is not None and len(given) not in (1, launch.local_world_size):
        raise ClusterConfigError(
            f"{strategy} got {len(given)} devices; {launch.launcher} started "
            f"{launch.local_world_size} processes on this machine, each of which is one replica: "
            "give as many devices, or none"
        )
    return device_in_slot(launch.local_rank, given)


def replica_of_machine(
    strategy: str, given: Sequence[torch.device] | None, options: CommunicationOptions
) -> tuple[torch.device, Communicator | None]:
    """Return this process's device and the communicator of all replicas of one machine."""
    place = roster_place()
    if place is not None:
        return device_in_slot(place.slot, given), init(elastic=True, timeout=options.timeout_s)
    replica = started_replica()
    launch = detect_launch()
    if replica is not None or launch is None or launch.world_size == 1:
        if replica is not None and given is None:
            given = usable_devices(replica.devices, "devices")
        own = given or every_device()
        if len(own) == 1 and replica is None:
            return own[0], None
        joined = join_replicas(strategy, own)
        use_own_cores(len(own))
        return own[joined.index], init(timeout=options.timeout_s)
    if launch.local_world_size != launch.world_size:
        raise ClusterConfigError(
            f"{strategy} is for one machine; {launch.launcher} started {launch.world_size} "
            f"processes, {launch.local_world_size} of them on this machine. Use "
            "MultiWorkerMirroredStrategy"
        )
    return device_under(launch, strategy, given), init(timeout=options.timeout_s)
