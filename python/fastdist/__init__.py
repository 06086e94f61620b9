"""tf.distribute for PyTorch, on fast collectives of its own."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import fastdist.cluster as cluster
import fastdist.errors as errors
from fastdist._version import __version__
from fastdist.cluster.launch import claim_place
from fastdist.collectives.communicator import Communicator
from fastdist.collectives.functions import default as _default
from fastdist.collectives.hints import unknown_name
from fastdist.collectives.init import default_communicator, init, is_chief, local_group
from fastdist.collectives.types import Work
from fastdist.integrations.torch_backend import register_with_torch, unusable_torch

__all__ = [
    "CentralStorageStrategy",
    "Checkpoint",
    "CheckpointManager",
    "ClusterCoordinator",
    "CommunicationOptions",
    "Communicator",
    "DefaultStrategy",
    "Elastic",
    "MirroredStrategy",
    "MultiWorkerMirroredStrategy",
    "OneDeviceStrategy",
    "ParameterServerStrategy",
    "PerReplica",
    "PerWorkerValues",
    "PreemptionCheckpointHandler",
    "RemoteValue",
    "ReplicaContext",
    "ShardedOptimizer",
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
    "checkpoints_iterator",
    "cluster",
    "data",
    "default_communicator",
    "errors",
    "gather",
    "gather_object",
    "get_replica_context",
    "get_strategy",
    "get_worker_index",
    "has_strategy",
    "in_cross_replica_context",
    "init",
    "is_chief",
    "keras",
    "launch",
    "local_group",
    "map",
    "nn",
    "ps",
    "recv",
    "recv_any",
    "recv_any_object",
    "recv_object",
    "reduce",
    "reduce_scatter",
    "scan",
    "scatter",
    "scatter_object",
    "send",
    "send_object",
]

if TYPE_CHECKING:
    from fastdist import data, keras, nn, ps
    from fastdist.checkpoints import (
        Checkpoint,
        CheckpointManager,
        Elastic,
        PreemptionCheckpointHandler,
        checkpoints_iterator,
    )
    from fastdist.integrations.sharded_optimizer import ShardedOptimizer
    from fastdist.ps.coordinator import (
        ClusterCoordinator,
        PerWorkerValues,
        RemoteValue,
        get_worker_index,
    )
    from fastdist.ps.strategy import ParameterServerStrategy
    from fastdist.replicas.context import ReplicaContext, in_cross_replica_context
    from fastdist.replicas.launch import launch
    from fastdist.replicas.per_replica import PerReplica, map
    from fastdist.replicas.variables import Variable, VariableAggregation, VariableSynchronization
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
    from fastdist.tpu.strategy import TPUStrategy

# These need torch, or sockets, which `import fastdist` does not load.
_LAZY = {
    "checkpoints": (
        *("Checkpoint", "CheckpointManager", "Elastic", "PreemptionCheckpointHandler"),
        "checkpoints_iterator",
    ),
    "integrations.sharded_optimizer": ("ShardedOptimizer",),
    "ps.coordinator": ("ClusterCoordinator", "PerWorkerValues", "RemoteValue", "get_worker_index"),
    "ps.strategy": ("ParameterServerStrategy",),
    "replicas.context": ("ReplicaContext", "in_cross_replica_context"),
    "replicas.launch": ("launch",),
    "replicas.per_replica": ("PerReplica", "map"),
    "replicas.variables": ("Variable", "VariableAggregation", "VariableSynchronization"),
    "strategies": (
        *("CentralStorageStrategy", "CommunicationOptions", "DefaultStrategy", "MirroredStrategy"),
        *("MultiWorkerMirroredStrategy", "OneDeviceStrategy", "Strategy"),
        *("get_replica_context", "get_strategy", "has_strategy"),
    ),
    "tpu.strategy": ("TPUStrategy",),
}
_MODULES = {"data", "keras", "nn", "ps"}

_OTHER_NAMES = {  # of tf.distribute, torch.distributed, MPI and Horovod
    "bcast": "broadcast",
    "coordinator": "fastdist.ClusterCoordinator",
    "distribute": "the names in fastdist itself, such as fastdist.MirroredStrategy",
    "experimental": "the names in fastdist itself",
    "getrank": "init().rank",
    "getworldsize": "init().world_size",
    "initializetpusystem": "fastdist.TPUStrategy, which starts the TPU",
    "initprocessgroup": 'init, or torch.distributed.init_process_group("fastdist")',
    "rank": "init().rank",
    "reduceop": 'a string, such as op="sum"',
    "size": "init().world_size",
    "train": "fastdist.Checkpoint, fastdist.CheckpointManager or fastdist.checkpoints_iterator",
    "worldsize": "init().world_size",
    **{each.replace("_", "").lower(): f"fastdist.cluster.{each}" for each in cluster.__all__},
}


all_gather = _default.all_gather
all_gather_object = _default.all_gather_object
all_reduce = _default.all_reduce
all_to_all = _default.all_to_all
barrier = _default.barrier
broadcast = _default.broadcast
broadcast_object = _default.broadcast_object
gather = _default.gather
gather_object = _default.gather_object
recv = _default.recv
recv_any = _default.recv_any
recv_any_object = _default.recv_any_object
recv_object = _default.recv_object
reduce = _default.reduce
reduce_scatter = _default.reduce_scatter
scan = _default.scan
scatter = _default.scatter
scatter_object = _default.scatter_object
send = _default.send
send_object = _default.send_object

register_with_torch()
claim_place()
if not {"lightning", "pytorch_lightning", "lightning_fabric"}.isdisjoint(sys.modules):
    import fastdist.integrations.lightning  # noqa: F401


def __getattr__(name: str) -> object:
    modules = [name] if name in _MODULES else [m for m in _LAZY if name in _LAZY[m]]
    if not modules:
        raise AttributeError(unknown_name("module 'fastdist'", name, __all__, _OTHER_NAMES))
    import importlib

    try:
        found: object = importlib.import_module(f"fastdist.{modules[0]}")
        if name not in _MODULES:
            found = getattr(found, name)
            if "fastdist.strategies" in sys.modules:
                importlib.import_module("fastdist.keras")  # adapts Keras models; light
    except (ImportError, AttributeError, OSError) as error:
        if (why := unusable_torch(error)) is None:
            raise
        raise ImportError(f"fastdist.{name} needs torch{why}", name="torch") from error
    if (why := unusable_torch()) is not None:
        raise ImportError(f"fastdist.{name} needs torch{why}", name="torch")
    return found


def __dir__() -> list[str]:
    return __all__
