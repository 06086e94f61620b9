"""One replica on a device of the user's choice."""

from __future__ import annotations

import torch

from fastdist.strategies.base import Strategy
from fastdist.strategies.links import Links


class OneDeviceStrategy(Strategy):
    """Puts modules and data on one device (tf.distribute.OneDeviceStrategy).

    Args:
        device: as for `torch.device`.
    """

    def __init__(self, device: str | torch.device) -> None:
        super().__init__([torch.device(device)], Links)
