"""The ranks that torchrun or `fastdist run` started, or a user who set RANK and WORLD_SIZE."""

import os
from collections.abc import Mapping

from fastdist._config import settings
from fastdist.cluster.address_exchange import exchange_addresses
from fastdist.cluster.environ import Environ, index_of_size, master_address
from fastdist.cluster.jobs import divide_among_jobs
from fastdist.cluster.launch import JOB_VARIABLE
from fastdist.cluster.resolver import SimpleClusterResolver
from fastdist.cluster.spec import ClusterSpec
from fastdist.errors import ClusterConfigError


class TorchrunClusterResolver(SimpleClusterResolver):
    """Reads RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT; every rank is a worker, or has a job.

    The launcher tells the address of rank 0 only, so the cluster spec has None for the others. With
    `jobs` all ranks tell each other where they will listen.
    Under torchrun that address belongs to a store that runs already: where
    TORCHELASTIC_USE_AGENT_STORE is "True", rank 0 connects to it like all others and must not
    listen. `torch.distributed.rendezvous` looks at this.
    """

    __slots__ = ()

    def __init__(
        self, environ: Environ = os.environ, *, jobs: Mapping[str, int] | None = None
    ) -> None:
        """Reads the variables. With `jobs`, every rank must call.

        Args:
            environ: the environment to read.
            jobs: how many tasks each job gets, such as {"chief": 1, "worker": 4, "ps": 2}: rank 0
                is the chief. Each rank takes a free port of its machine, and they exchange their
                addresses through torch's store at MASTER_ADDR and MASTER_PORT. If None, all are
                workers.

        Raises:
            ClusterConfigError: a variable is missing or malformed. MASTER_ADDR and MASTER_PORT may
                be missing until somebody asks for the coordinator's address, if jobs is None; else
                also where jobs have another number of tasks, or ranks do not come in time.
        """
        rank, world_size = index_of_size(environ, "RANK", "WORLD_SIZE")
        master = master_address(environ)
        if jobs is None:
            super().__init__(ClusterSpec.of_ranks(world_size, master), "worker", rank)
            return
        reason = f"WORLD_SIZE={environ['WORLD_SIZE']!r}"
        unknown = [None] * world_size
        divide_among_jobs(jobs, unknown, rank, reason)  # refused before anybody waits
        if master is None:
            raise ClusterConfigError(
                "MASTER_ADDR and MASTER_PORT are not set; expected where ranks exchange addresses"
            )
        attempt = environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        timeout_s = settings(environ).rendezvous_timeout_s
        addresses = exchange_addresses(rank, world_size, master, attempt, timeout_s)
        super().__init__(*divide_among_jobs(jobs, addresses, rank, reason))

    @staticmethod
    def is_available(environ: Environ = os.environ) -> bool:
        """Whether some launcher or user set a rank in this way."""
        return not {"RANK", "TORCHELASTIC_RUN_ID", JOB_VARIABLE}.isdisjoint(environ)
