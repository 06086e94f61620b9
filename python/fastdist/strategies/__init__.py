"""Strategies: they determine the replicas that train together, and their devices."""

from fastdist.strategies.base import Strategy
from fastdist.strategies.central_storage import CentralStorageStrategy
from fastdist.strategies.default import (
    DefaultStrategy,
    OneDeviceStrategy,
    get_replica_context,
    get_strategy,
    has_strategy,
)
from fastdist.strategies.mirrored import MirroredStrategy, MultiWorkerMirroredStrategy
from fastdist.training.communicators import CommunicationOptions

__all__ = [
    "CentralStorageStrategy",
    "CommunicationOptions",
    "DefaultStrategy",
    "MirroredStrategy",
    "MultiWorkerMirroredStrategy",
    "OneDeviceStrategy",
    "Strategy",
    "get_replica_context",
    "get_strategy",
    "has_strategy",
]
