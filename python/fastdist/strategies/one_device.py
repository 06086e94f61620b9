"""One replica on a device of the user's choice."""

from __future__ import annotations

import torch

from fastdist.strategies.communicators import Links
from fastdist.strategies.replicated import LinkedStrategy


class OneDeviceStrategy(LinkedStrategy):
    """Puts modules and data on one device (tf.distribute.OneDeviceStrategy).

    Args:
        device: as for `torch.device`.
    """

    def __init__(self, device: str | torch.device) -> None:
        super().__init__([torch.device(device)], Links)
