"""The ranks of an mpiexec job, from environment variables; needs no MPI library."""

import os

from fastdist.cluster.environ import Environ, index_of_size, master_address
from fastdist.cluster.resolver import SimpleClusterResolver
from fastdist.cluster.spec import ClusterSpec
from fastdist.errors import ClusterConfigError


class MPIClusterResolver(SimpleClusterResolver):
    """Reads the variables of Open MPI, or of MPICH's and Intel MPI's Hydra; every rank is a worker.

    mpiexec does not publish the addresses of its ranks. For ranks on several machines, pass the
    address of rank 0 here, or set MASTER_ADDR and MASTER_PORT (`mpiexec -x` or `-genv`).

    Examples:
        >>> import fastdist as fd
        >>> environ = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}
        >>> fd.cluster.MPIClusterResolver("a:29500", environ=environ).rank
        1
    """

    __slots__ = ()

    def __init__(
        self, coordinator_address: str | None = None, *, environ: Environ = os.environ
    ) -> None:
        """Read the variables of an environment.

        Args:
            coordinator_address: a "host:port" where rank 0 can listen; from MASTER_ADDR and
                MASTER_PORT if None.

        Raises:
            ClusterConfigError: mpiexec did not start this process, or a variable is malformed.
        """
        if is_openmpi(environ):
            place = index_of_size(environ, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")
        elif is_hydra(environ):
            place = index_of_size(environ, "PMI_RANK", "PMI_SIZE")
        else:
            raise ClusterConfigError(
                "neither OMPI_COMM_WORLD_RANK nor PMI_RANK with MPI_LOCALRANKID is set; "
                "expected a process that mpiexec started"
            )
        rank, world_size = place
        address = master_address(environ) if coordinator_address is None else coordinator_address
        super().__init__(ClusterSpec.of_ranks(world_size, address), "worker", rank)

    @staticmethod
    def is_available(environ: Environ = os.environ) -> bool:
        """Return True if mpiexec started this process."""
        return is_openmpi(environ) or is_hydra(environ)


def is_openmpi(environ: Environ) -> bool:
    """Return True if Open MPI's mpiexec started this process."""
    return "OMPI_COMM_WORLD_RANK" in environ


def is_hydra(environ: Environ) -> bool:
    """Return True if Hydra started this process."""
    # `srun --mpi=pmi2` also sets PMI_RANK, without the local rank; its own variables have that.
    return "PMI_RANK" in environ and "MPI_LOCALRANKID" in environ
