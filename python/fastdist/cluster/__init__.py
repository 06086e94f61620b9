"""The rank of this process in its job, and the machines of the other ranks."""

import os

from fastdist.cluster.address import join_address, split_address
from fastdist.cluster.environ import Environ, require_rank_of_world_size
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


def detect_resolver(environ: Environ = os.environ) -> ClusterResolver | None:
    """Return the resolver for the way this process was started; None for a world of one.

    TF_CONFIG, which is written for one job, comes first; then the launchers in the order of
    `detect_launch`: torchrun, `fastdist run` and RANK set by hand, mpiexec, srun.

    Raises:
        ClusterConfigError: variables are incomplete, malformed or contradict each other.

    Examples:
        >>> import fastdist as fd
        >>> fd.cluster.detect_resolver({}) is None
        True
    """
    for kind in (
        TFConfigClusterResolver,
        TorchrunClusterResolver,
        MPIClusterResolver,
        SlurmClusterResolver,
    ):
        if kind.is_available(environ):
            return kind(environ=environ)
    require_rank_of_world_size(environ)
    return None


def __dir__() -> list[str]:
    return __all__
