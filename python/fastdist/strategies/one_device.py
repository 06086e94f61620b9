"""One replica on a device of the user's choice."""

from __future__ import annotations

import torch

from fastdist.strategies.linked import LinkedStrategy
from fastdist.strategies.links import Links


class OneDeviceStrategy(LinkedStrategy):
    """Puts modules and data on one device (tf.distribute.OneDeviceStrategy).

    Args:
        device: as for `torch.device`.
    """

    def __init__(self, device: str | torch.device) -> None:
        super().__init__([torch.device(device)], Links)
