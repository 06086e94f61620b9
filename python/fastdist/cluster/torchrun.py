"""The ranks of torchrun, of `fastdist run`, or of a user who sets RANK and WORLD_SIZE."""

import datetime
import functools
import os
import socket
from collections.abc import Mapping
from contextlib import suppress
from importlib import import_module
from typing import Any

from fastdist._config import settings
from fastdist.cluster.address import join_address, own_address, reserve_port, split_address
from fastdist.cluster.environ import Environ, index_of_size, master_address
from fastdist.cluster.launch import JOB_VARIABLE
from fastdist.cluster.resolver import SimpleClusterResolver, divide_among_jobs
from fastdist.cluster.spec import ClusterSpec
from fastdist.errors import ClusterConfigError


class TorchrunClusterResolver(SimpleClusterResolver):
    """Reads RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT; ranks are workers, or tasks of `jobs`.

    The launcher publishes the address of rank 0 only, so the cluster spec has None for the other
    ranks. With `jobs`, all ranks exchange their addresses.

    Under torchrun, the address of rank 0 may belong to a store that already runs: if
    TORCHELASTIC_USE_AGENT_STORE is "True", rank 0 connects to it like all other ranks and must not
    listen. `torch.distributed.rendezvous` handles both cases.

    Examples:
        >>> import fastdist as fd
        >>> environ = {"RANK": "1", "WORLD_SIZE": "2"}
        >>> environ |= {"MASTER_ADDR": "a", "MASTER_PORT": "7000"}
        >>> fd.cluster.TorchrunClusterResolver(environ).coordinator_address
        'a:7000'
    """

    __slots__ = ()

    def __init__(
        self, environ: Environ = os.environ, *, jobs: Mapping[str, int] | None = None
    ) -> None:
        """Read the variables of an environment. With `jobs`, every rank must call.

        Args:
            jobs: number of tasks of each job, such as {"chief": 1, "worker": 4, "ps": 2}: rank 0
                is the chief. Each rank reserves a free port of its machine, and the ranks exchange
                their addresses through torch's store at MASTER_ADDR and MASTER_PORT. If None, all
                ranks are workers.

        Raises:
            ClusterConfigError: a variable is missing or malformed; without jobs, MASTER_ADDR and
                MASTER_PORT are only needed for the coordinator's address. With jobs: the number of
                tasks differs from WORLD_SIZE, or a rank does not arrive in time.
        """
        rank, world_size = index_of_size(environ, "RANK", "WORLD_SIZE")
        master = master_address(environ)
        if jobs is None:
            super().__init__(ClusterSpec.of_ranks(world_size, master), "worker", rank)
            return
        reason = f"WORLD_SIZE={environ['WORLD_SIZE']!r}"
        unknown = [None] * world_size
        divide_among_jobs(jobs, unknown, rank, reason)  # checked before any rank waits
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
        """Return True if torchrun, `fastdist run` or a user has set the variables of a rank."""
        return not {"RANK", "TORCHELASTIC_RUN_ID", JOB_VARIABLE}.isdisjoint(environ)


# Kept until the process ends: the reserved port, and the store, which other ranks may still use.
_ports: list[socket.socket] = []
_stores: list[Any] = []


@functools.cache
def exchange_addresses(
    rank: int, world_size: int, store_address: str, attempt: str, timeout_s: float
) -> tuple[str, ...]:
    """Return the address of each process, by rank, with a free port. Every rank must call.

    Later calls return the same addresses. Rank 0 opens the store unless torchrun's agent has.
    """
    try:
        distributed = import_module("torch.distributed")
    except ImportError:
        raise ImportError(
            "TorchrunClusterResolver(jobs=…) needs torch: pip install torch"
        ) from None
    host, port = split_address(store_address)
    own = own_address(host, port)
    holder, own_port = reserve_port(own)
    _ports.append(holder)
    patience = datetime.timedelta(seconds=max(1.0, timeout_s))
    try:
        url = f"tcp://{store_address}"
        whole, _, _ = next(distributed.rendezvous(url, rank, world_size, timeout=patience))
        _stores.append(whole)
        store = distributed.PrefixStore(f"fastdist/addresses/{attempt}", whole)
        store.set(str(rank), join_address(own, own_port))
        addresses = tuple(store.get(str(other)).decode() for other in range(world_size))
        store.set(f"{rank} has read", "")
        if rank == 0:  # which may hold the store
            with suppress(RuntimeError):  # one that has all addresses, but does not say it
                store.wait([f"{other} has read" for other in range(world_size)], patience)
    except (RuntimeError, ValueError) as error:
        raise ClusterConfigError(
            f"rank {rank} of {world_size} could not exchange addresses at {store_address} within "
            f"{timeout_s:g} s: {str(error).partition(chr(10))[0]}"
        ) from None
    return addresses
