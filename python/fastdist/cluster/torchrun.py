"""The ranks that torchrun or `fastdist run` started, or a user who set RANK and WORLD_SIZE."""

import os

from fastdist.cluster.environ import Environ, index_of_size, master_address
from fastdist.cluster.launch import JOB_VARIABLE
from fastdist.cluster.resolver import SimpleClusterResolver
from fastdist.cluster.spec import ClusterSpec


class TorchrunClusterResolver(SimpleClusterResolver):
    """Reads RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT; every rank is a worker.

    The launcher tells the address of rank 0 only, so the cluster spec has None for the others.
    Under torchrun that address belongs to a store that runs already: where
    TORCHELASTIC_USE_AGENT_STORE is "True", rank 0 connects to it like all others and must not
    listen. `torch.distributed.rendezvous` looks at this.
    """

    __slots__ = ()

    def __init__(self, environ: Environ = os.environ) -> None:
        """Reads the variables.

        Args:
            environ: the environment to read.

        Raises:
            ClusterConfigError: a variable is missing or malformed. MASTER_ADDR and MASTER_PORT may
                be missing until somebody asks for the coordinator's address.
        """
        rank, world_size = index_of_size(environ, "RANK", "WORLD_SIZE")
        super().__init__(ClusterSpec.of_ranks(world_size, master_address(environ)), "worker", rank)

    @staticmethod
    def is_available(environ: Environ = os.environ) -> bool:
        """Whether some launcher or user set a rank in this way."""
        return not {"RANK", "TORCHELASTIC_RUN_ID", JOB_VARIABLE}.isdisjoint(environ)
