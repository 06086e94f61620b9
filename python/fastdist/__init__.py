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
    "ClusterCoordinator",
    "CommunicationOptions",
    "Communicator",
    "DefaultStrategy",
    "MirroredStrategy",
    "MultiWorkerMirroredStrategy",
    "OneDeviceStrategy",
    "ParameterServerStrategy",
    "PerReplica",
    "PerWorkerValues",
    "RemoteValue",
    "ReplicaContext",
    "Strategy",
    "TPUStrategy",
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
    "checkpoint",
    "data",
    "default_communicator",
    "errors",
    "gather",
    "get_replica_context",
    "get_strategy",
    "get_worker_index",
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
    from fastdist import checkpoint, data, nn
    from fastdist.context import ReplicaContext, in_cross_replica_context
    from fastdist.coordinator import (
        ClusterCoordinator,
        PerWorkerValues,
        RemoteValue,
        get_worker_index,
    )
    from fastdist.strategies import (
        CentralStorageStrategy,
        CommunicationOptions,
        DefaultStrategy,
        MirroredStrategy,
        MultiWorkerMirroredStrategy,
        OneDeviceStrategy,
        Strategy,
        TPUStrategy,
        get_replica_context,
        get_strategy,
        has_strategy,
    )
    from fastdist.strategies.parameter_server import ParameterServerStrategy
    from fastdist.values import PerReplica
    from fastdist.variables import Variable, VariableAggregation, VariableSynchronization

# These need torch or pyzmq, which `import fastdist` does not load.
_LAZY = {
    "ClusterCoordinator": "fastdist.coordinator",
    "ParameterServerStrategy": "fastdist.strategies.parameter_server",
    "PerWorkerValues": "fastdist.coordinator",
    "RemoteValue": "fastdist.coordinator",
    "get_worker_index": "fastdist.coordinator",
    "CentralStorageStrategy": "fastdist.strategies",
    "CommunicationOptions": "fastdist.strategies",
    "DefaultStrategy": "fastdist.strategies",
    "MirroredStrategy": "fastdist.strategies",
    "MultiWorkerMirroredStrategy": "fastdist.strategies",
    "OneDeviceStrategy": "fastdist.strategies",
    "ReplicaContext": "fastdist.context",
    "Strategy": "fastdist.strategies",
    "TPUStrategy": "fastdist.strategies",
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
    is_module = name in ("checkpoint", "data", "nn")
    if name not in _LAZY and not is_module:
        raise AttributeError(f"module 'fastdist' has no attribute {name!r}")
    import importlib

    try:
        if is_module:
            return importlib.import_module(f"fastdist.{name}")
        return getattr(importlib.import_module(_LAZY[name]), name)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ImportError(
            f"fastdist.{name} needs torch: pip install 'fastdist[torch]'", name="torch"
        ) from error
