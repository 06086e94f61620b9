"""The rank of this process in its job, and the machines of the other ranks."""

from fastdist.cluster.address import join_address, split_address
from fastdist.cluster.detection import detect_resolver
from fastdist.cluster.kubernetes import KubernetesClusterResolver
from fastdist.cluster.launch import Launch, detect_launch
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


def __dir__() -> list[str]:
    return __all__
