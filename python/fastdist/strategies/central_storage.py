"""Replicas on the devices of one machine, with one copy of every parameter for all of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fastdist.errors import UnsupportedError
from fastdist.replicas.devices import every_device, usable_device, usable_devices
from fastdist.strategies.central import CentralParameters
from fastdist.strategies.mirrored import join_replicas_of_machine
from fastdist.strategies.replicated import ReplicatedStrategy
from fastdist.training.communicators import CommunicationOptions


class CentralStorageStrategy(ReplicatedStrategy):
    """Keeps one copy of parameters and optimizer states (CentralStorageStrategy of tf.distribute).

    Replicas are processes, as under MirroredStrategy, and compute on the compute devices. Their
    gradients are reduced. When all replicas call `optimizer.step()`, the first replica's optimizer
    steps once, on the device of the parameters. Replicas on the CPU map the memory of the
    parameters; replicas on other devices have copies, which get the new values after each step.
    Each replica has its own buffers, as under MirroredStrategy.

    Every replica runs the program, so each in-place change of a parameter is applied to the one
    copy once per replica. In `run` such a change is an error, unless it goes through `.data`, which
    torch does not trace. Between runs, where replicas do not wait for each other, use `update`, but
    for values that all replicas write alike, as by `load_state_dict` of a checkpoint and `clamp_`.
    Saving values and loading others before the next run does not work, since another replica may
    load first.

    Args:
        compute_devices: devices of the replicas; None: as in `MirroredStrategy`.
        parameter_device: device of parameters and optimizer states; None: the compute device if
            there is only one, else the CPU.
        options: communication options.

    Raises:
        ClusterConfigError: as for MirroredStrategy.
        ValueError: torch cannot use a device.
        UnsupportedError: the options divide optimizers' states among replicas.

    Examples:
        >>> import fastdist as fd
        >>> strategy = fd.CentralStorageStrategy(["cpu:0"], parameter_device="cpu")
        >>> strategy.num_replicas_in_sync
        1
    """

    def __init__(
        self,
        compute_devices: Sequence[str | torch.device] | None = None,
        parameter_device: str | torch.device | None = None,
        *,
        options: CommunicationOptions | None = None,
    ) -> None:
        options = options or CommunicationOptions()
        if options.shard_optimizer:
            raise UnsupportedError(
                "CentralStorageStrategy has one copy of the optimizers' states for all replicas: "
                "shard_optimizer needs MirroredStrategy or MultiWorkerMirroredStrategy"
            )
        given = None
        if compute_devices is not None:
            given = usable_devices(compute_devices, "compute_devices")
        every = given or every_device()
        if parameter_device is None:
            parameter_device = every[0] if len(set(every)) == 1 else "cpu"
        home = usable_device(parameter_device)
        device, world = join_replicas_of_machine("CentralStorageStrategy", given, options)
        central = CentralParameters(
            home,
            device,
            is_owner=world is None or world.rank == 0,
            is_shared=home.type == "cpu" and all(one.type == "cpu" for one in every),
        )
        super().__init__(device, world, central=central, options=options)
