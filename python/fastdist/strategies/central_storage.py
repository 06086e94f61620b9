"""Replicas on the devices of one machine, with one copy of every parameter for all of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fastdist.replicas.devices import every_device, usable_device, usable_devices
from fastdist.strategies.central import CentralParameters
from fastdist.strategies.mirrored import replica_of_machine
from fastdist.strategies.options import CommunicationOptions
from fastdist.strategies.replicated import ReplicatedStrategy


class CentralStorageStrategy(ReplicatedStrategy):
    """Keeps parameters and optimizer states in one place (tf.distribute's of that name).

    Replicas are processes, as MirroredStrategy's are, and compute on the compute devices. Their
    gradients are reduced, and when all of them call `optimizer.step()` the first one's optimizer
    steps, once, where the parameters are. Replicas on the CPU map the memory of the parameters;
    replicas on other devices have copies, which get the new values after each step. Buffers are the
    replicas' own, as under Mirrored.

    Every replica runs the program, so what it does to a parameter in place is done to the one copy
    once for each replica. In `run` that is an error. Between runs, use `update`; operations that
    give the same however often they are done (`load_state_dict`, `clamp_`) are fine.

    Args:
        compute_devices: of the replicas; every GPU if None, else one CPU.
        parameter_device: of parameters and optimizer states; the compute device if None and there
            is only one, else the CPU.
        options: how to communicate.

    Raises:
        ClusterConfigError: as for MirroredStrategy.
        ValueError: torch cannot use a device.
    """

    def __init__(
        self,
        compute_devices: Sequence[str | torch.device] | None = None,
        parameter_device: str | torch.device | None = None,
        *,
        options: CommunicationOptions | None = None,
    ) -> None:
        options = options or CommunicationOptions()
        given = None
        if compute_devices is not None:
            given = usable_devices(compute_devices, "compute_devices")
        every = given or every_device()
        if parameter_device is None:
            parameter_device = every[0] if len(set(every)) == 1 else "cpu"
        home = usable_device(parameter_device)
        device, world = replica_of_machine("CentralStorageStrategy", given, options)
        central = CentralParameters(
            home,
            device,
            is_owner=world is None or world.rank == 0,
            is_shared=home.type == "cpu" and all(one.type == "cpu" for one in every),
        )
        super().__init__(device, world, central=central, options=options)
