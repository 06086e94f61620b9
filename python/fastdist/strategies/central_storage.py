"""Replicas on the devices of one machine, with one copy of every variable for all of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fastdist.cluster import detect_launch
from fastdist.errors import ClusterConfigError
from fastdist.replicas.devices import every_device, physical_device
from fastdist.strategies.communicators import thread_links
from fastdist.strategies.options import CommunicationOptions
from fastdist.strategies.replicated import LinkedStrategy


class CentralStorageStrategy(LinkedStrategy):
    """Keeps parameters and optimizer states in one place (tf.distribute's of that name).

    Replicas compute on the compute devices, each in a thread of its own. Their gradients are
    reduced, and when all of them call `optimizer.step()` it steps once, where the parameters are.
    Replicas on the parameters' device compute with the parameters themselves, others with copies
    that get the new values after each step. Buffers are the replicas' own, as under Mirrored. What
    a replica does to a parameter's values by hand, all on that device see: change parameters by the
    optimizer, outside `run`, or in `merge_call`.

    Args:
        compute_devices: of the replicas; every GPU if None, else one CPU.
        parameter_device: of parameters and optimizer states; the compute device if None and there
            is only one, else the CPU.
        options: how to communicate.

    Raises:
        ClusterConfigError: a launcher started several processes.
    """

    def __init__(
        self,
        compute_devices: Sequence[str | torch.device] | None = None,
        parameter_device: str | torch.device | None = None,
        *,
        options: CommunicationOptions | None = None,
    ) -> None:
        options = options or CommunicationOptions()
        if compute_devices is not None and not compute_devices:
            raise ValueError("compute_devices must not be empty; None takes what the machine has")
        launch = detect_launch()
        if launch is not None and launch.world_size > 1:
            raise ClusterConfigError(
                f"CentralStorageStrategy is for one process; {launch.launcher} started "
                f"{launch.world_size}. Use MirroredStrategy or MultiWorkerMirroredStrategy"
            )
        given = every_device() if compute_devices is None else compute_devices
        devices = [physical_device(torch.device(device)) for device in given]
        if parameter_device is None:
            parameter_device = devices[0] if len(set(devices)) == 1 else "cpu"
        super().__init__(
            devices,
            lambda: thread_links(len(devices), options),
            parameter_device=physical_device(torch.device(parameter_device)),
            options=options,
        )
