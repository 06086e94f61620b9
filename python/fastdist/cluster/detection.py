"""Chooses the resolver that fits the environment."""

import os

from fastdist.cluster.environ import Environ, require_rank_of_world_size
from fastdist.cluster.mpi import MPIClusterResolver
from fastdist.cluster.resolver import ClusterResolver
from fastdist.cluster.slurm import SlurmClusterResolver
from fastdist.cluster.tf_config import TFConfigClusterResolver
from fastdist.cluster.torchrun import TorchrunClusterResolver


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
