"""Where this process stands among the ranks of its job, and on which machines the others are."""

from fastdist.cluster.address import join_address, split_address
from fastdist.cluster.detection import detect_resolver
from fastdist.cluster.kubernetes import IndexedJobClusterResolver, KubernetesClusterResolver
from fastdist.cluster.launch import Launch, detect_launch
from fastdist.cluster.mpi import MPIClusterResolver
from fastdist.cluster.resolver import ClusterResolver, SimpleClusterResolver
from fastdist.cluster.slurm import SlurmClusterResolver
from fastdist.cluster.spec import ClusterSpec
from fastdist.cluster.tf_config import TFConfigClusterResolver
from fastdist.cluster.torchrun import TorchrunClusterResolver

__all__ = [
    "ClusterResolver",
    "ClusterSpec",
    "IndexedJobClusterResolver",
    "KubernetesClusterResolver",
    "Launch",
    "MPIClusterResolver",
    "SimpleClusterResolver",
    "SlurmClusterResolver",
    "TFConfigClusterResolver",
    "TorchrunClusterResolver",
    "detect_launch",
    "detect_resolver",
    "join_address",
    "split_address",
]
