"""One replica on a given device."""

from __future__ import annotations

import torch

from fastdist.replicas.devices import usable_device
from fastdist.strategies.replicated import ReplicatedStrategy


class OneDeviceStrategy(ReplicatedStrategy):
    """Puts modules and data on one device (tf.distribute.OneDeviceStrategy).

    Args:
        device: as for `torch.device`.

    Raises:
        ValueError: torch cannot use the device.

    Examples:
        >>> import fastdist as fd, torch
        >>> strategy = fd.OneDeviceStrategy("cpu")
        >>> strategy.run(lambda: torch.ones(2).sum())
        tensor(2.)
    """

    def __init__(self, device: str | torch.device) -> None:
        super().__init__(usable_device(device))
