"""The rank of this process in its job, and the machines of the other ranks.

Resolvers are loaded when first used: `import fastdist` needs none of them.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from fastdist.cluster.launch import Launch, detect_launch

if TYPE_CHECKING:
    from fastdist.cluster.address import join_address, split_address
    from fastdist.cluster.detection import detect_resolver
    from fastdist.cluster.kubernetes import KubernetesClusterResolver
    from fastdist.cluster.mpi import MPIClusterResolver
    from fastdist.cluster.resolver import ClusterResolver, SimpleClusterResolver
    from fastdist.cluster.slurm import SlurmClusterResolver
    from fastdist.cluster.spec import ClusterSpec
    from fastdist.cluster.tf_config import TFConfigClusterResolver
    from fastdist.cluster.torchrun import TorchrunClusterResolver
    from fastdist.cluster.tpu import TPUClusterResolver

__all__ = [
    "ClusterResolver",
    "ClusterSpec",
    "KubernetesClusterResolver",
    "Launch",
    "MPIClusterResolver",
    "SimpleClusterResolver",
    "SlurmClusterResolver",
    "TFConfigClusterResolver",
    "TPUClusterResolver",
    "TorchrunClusterResolver",
    "detect_launch",
    "detect_resolver",
    "join_address",
    "split_address",
]

_MODULES = {
    "address": ("join_address", "split_address"),
    "detection": ("detect_resolver",),
    "kubernetes": ("KubernetesClusterResolver",),
    "mpi": ("MPIClusterResolver",),
    "resolver": ("ClusterResolver", "SimpleClusterResolver"),
    "slurm": ("SlurmClusterResolver",),
    "spec": ("ClusterSpec",),
    "tf_config": ("TFConfigClusterResolver",),
    "torchrun": ("TorchrunClusterResolver",),
    "tpu": ("TPUClusterResolver",),
}


def __getattr__(name: str) -> object:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(f"fastdist.cluster.{module}"), name)
    raise AttributeError(f"module 'fastdist.cluster' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
