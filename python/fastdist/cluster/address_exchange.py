"""Exchanges the addresses of the processes of a torchrun job, through torch's store."""

from __future__ import annotations

import datetime
import functools
import socket
import time
from importlib import import_module
from typing import Any

from fastdist.cluster.address import join_address, split_address
from fastdist.cluster.own_address import own_address
from fastdist.cluster.ports import reserve_port
from fastdist.errors import ClusterConfigError

_POLL_S = 0.02
# Kept until the process ends: the reserved port, and the store, which other ranks may still use.
_ports: list[socket.socket] = []
_stores: list[Any] = []


@functools.cache
def exchange_addresses(
    rank: int, world_size: int, store_address: str, attempt: str, timeout_s: float
) -> tuple[str, ...]:
    """Return the address of each process, by rank, with a free port. Every rank must call.

    Later calls return the same addresses.

    Args:
        rank: rank of this process.
        world_size: number of ranks.
        store_address: "host:port" of the store; rank 0 opens it unless torchrun's agent has.
        attempt: number of restarts of the job, the same on all ranks.
        timeout_s: seconds to wait for all ranks.

    Raises:
        ClusterConfigError: a rank did not arrive in time, or the store cannot be reached.
        ImportError: torch is not installed.
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
        _wait_for_readers(store, rank, world_size, timeout_s)
    except (RuntimeError, ValueError) as error:
        raise ClusterConfigError(
            f"rank {rank} of {world_size} could not exchange addresses at {store_address} within "
            f"{timeout_s:g} s: {str(error).partition(chr(10))[0]}"
        ) from None
    return addresses


def _wait_for_readers(store: Any, rank: int, world_size: int, timeout_s: float) -> None:
    """Make rank 0, which may hold the store, wait until all ranks have read."""
    readers = store.add("readers", 1)
    deadline = time.monotonic() + timeout_s
    while rank == 0 and readers < world_size and time.monotonic() < deadline:
        time.sleep(_POLL_S)
        readers = store.add("readers", 0)
