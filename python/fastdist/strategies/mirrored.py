"""Replicas on the devices of one machine, each with a copy of every variable."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fastdist.cluster import detect_launch
from fastdist.collectives.init import init
from fastdist.errors import ClusterConfigError
from fastdist.replicas.devices import every_device, physical_device
from fastdist.strategies.communicators import process_links, thread_links
from fastdist.strategies.options import CommunicationOptions
from fastdist.strategies.replicated import LinkedStrategy


class MirroredStrategy(LinkedStrategy):
    """Trains on all devices of this machine at once (tf.distribute.MirroredStrategy).

    Started by `fastdist run` or another launcher, each process is one replica. Started alone, the
    process runs a replica on each device, in a thread of its own.

    Args:
        devices: of the replicas; every GPU if None, else one CPU. `["cpu:0", "cpu:1"]` makes two
            replicas on the CPU. Under a launcher: one for each process, or one for all.
        options: how to communicate.

    Raises:
        ClusterConfigError: the launcher started another number of processes than there are
            devices, or processes on several machines.
    """

    def __init__(
        self,
        devices: Sequence[str | torch.device] | None = None,
        *,
        options: CommunicationOptions | None = None,
    ) -> None:
        options = options or CommunicationOptions()
        given = None if devices is None else [torch.device(device) for device in devices]
        if given is not None and not given:
            raise ValueError("devices must not be empty; None takes what the machine has")
        launch = detect_launch()
        if launch is None or launch.world_size == 1:
            own = given or every_device()
            super().__init__(
                [physical_device(device) for device in own],
                lambda: thread_links(len(own), options),
                options=options,
            )
            return
        if launch.local_world_size != launch.world_size:
            raise ClusterConfigError(
                f"MirroredStrategy is for one machine; {launch.launcher} started "
                f"{launch.world_size} processes, {launch.local_world_size} of them here. Use "
                "MultiWorkerMirroredStrategy"
            )
        if given is not None and len(given) not in (1, launch.world_size):
            raise ClusterConfigError(
                f"MirroredStrategy got {len(given)} devices; {launch.launcher} started "
                f"{launch.world_size} processes, each of which is one replica: give as many "
                "devices, or none"
            )
        chosen = (given or every_device())[:]
        device = chosen[launch.local_rank % len(chosen)]
        super().__init__(
            [physical_device(device)],
            lambda: process_links(init(timeout=options.timeout_s), options),
            worker=launch.rank,
            workers=launch.world_size,
            options=options,
        )
