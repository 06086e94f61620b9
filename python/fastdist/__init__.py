"""tf.distribute for PyTorch, on the fastest collectives that Python has."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastdist import errors
from fastdist._version import __version__
from fastdist.communicator import Communicator, Work
from fastdist.default import (
    all_gather,
    all_gather_object,
    all_reduce,
    all_to_all,
    barrier,
    broadcast,
    broadcast_object,
    gather,
    recv,
    reduce,
    reduce_scatter,
    scatter,
    send,
)
from fastdist.world import default_communicator, init, local_group

__all__ = [
    "CentralStorageStrategy",
    "CommunicationOptions",
    "Communicator",
    "DefaultStrategy",
    "MirroredStrategy",
    "MultiWorkerMirroredStrategy",
    "OneDeviceStrategy",
    "PerReplica",
    "ReplicaContext",
    "Strategy",
    "Variable",
    "VariableAggregation",
    "VariableSynchronization",
    "Work",
    "__version__",
    "all_gather",
    "all_gather_object",
    "all_reduce",
    "all_to_all",
    "barrier",
    "broadcast",
    "broadcast_object",
    "data",
    "default_communicator",
    "errors",
    "gather",
    "get_replica_context",
    "get_strategy",
    "has_strategy",
    "in_cross_replica_context",
    "init",
    "local_group",
    "nn",
    "recv",
    "reduce",
    "reduce_scatter",
    "scatter",
    "send",
]

if TYPE_CHECKING:
    from fastdist import data, nn
    from fastdist.context import ReplicaContext, in_cross_replica_context
    from fastdist.strategies import (
        CentralStorageStrategy,
        CommunicationOptions,
        DefaultStrategy,
        MirroredStrategy,
        MultiWorkerMirroredStrategy,
        OneDeviceStrategy,
        Strategy,
        get_replica_context,
        get_strategy,
        has_strategy,
    )
    from fastdist.values import PerReplica
    from fastdist.variables import Variable, VariableAggregation, VariableSynchronization

# These need torch, which `import fastdist` does not load.
_NEEDS_TORCH = {
    "CentralStorageStrategy": "fastdist.strategies",
    "CommunicationOptions": "fastdist.strategies",
    "DefaultStrategy": "fastdist.strategies",
    "MirroredStrategy": "fastdist.strategies",
    "MultiWorkerMirroredStrategy": "fastdist.strategies",
    "OneDeviceStrategy": "fastdist.strategies",
    "ReplicaContext": "fastdist.context",
    "Strategy": "fastdist.strategies",
    "get_replica_context": "fastdist.strategies",
    "get_strategy": "fastdist.strategies",
    "has_strategy": "fastdist.strategies",
    "in_cross_replica_context": "fastdist.context",
    "PerReplica": "fastdist.values",
    "Variable": "fastdist.variables",
    "VariableAggregation": "fastdist.variables",
    "VariableSynchronization": "fastdist.variables",
}


def __getattr__(name: str) -> object:
    is_module = name in ("data", "nn")
    if name not in _NEEDS_TORCH and not is_module:
        raise AttributeError(f"module 'fastdist' has no attribute {name!r}")
    import importlib

    try:
        if is_module:
            return importlib.import_module(f"fastdist.{name}")
        return getattr(importlib.import_module(_NEEDS_TORCH[name]), name)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ImportError(
            f"fastdist.{name} needs torch: pip install 'fastdist[torch]'", name="torch"
        ) from error
