"""The strategy outside all scopes: one replica, nothing changed."""

from __future__ import annotations

import torch

from fastdist.context import set_default
from fastdist.strategies.base import Strategy
from fastdist.strategies.links import Links


class DefaultStrategy(Strategy):
    """Passes everything through; what `get_strategy` gives outside a scope.

    It lets code that is written for strategies run without one.
    """

    def __init__(self) -> None:
        super().__init__([torch.device("cpu")], Links)


set_default(DefaultStrategy)
