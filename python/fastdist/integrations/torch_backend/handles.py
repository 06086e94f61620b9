"""Handles by which ranks find each other for `reconfigure`, and the communicator of their ranks."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch._C import _distributed_c10d as c10d

from fastdist.cluster.address import join_address, split_address
from fastdist.collectives.communicator import Communicator
from fastdist.collectives.engines.host import HostEngine
from fastdist.collectives.rendezvous.machines import machine_id
from fastdist.errors import ClusterConfigError
from fastdist.integrations.torch_backend.bootstrap import communicator_in_store, tcp_store_of
from fastdist.recorder.encoding import decode, encode


@dataclass(frozen=True, slots=True)
class Handle:
    """The facts of a rank's process group that other ranks need.

    Attributes:
        name: a random name of the group object.
        machine: the result of `machine_id`.
        store: "host:port" of the TCPStore in which the group was made; "" if it was another store.
    """

    name: str
    machine: str
    store: str

    @classmethod
    def of_group(cls, store: Any) -> Handle:
        """Make the handle of a group that was made in this store."""
        tcp = tcp_store_of(store)
        address = "" if tcp is None else join_address(tcp.host, tcp.port)
        return cls(secrets.token_hex(16), machine_id(), address)

    def pack(self) -> str:
        """Encode as JSON."""
        return encode(self)

    @classmethod
    def unpack(cls, text: str) -> Handle:
        """Decode the output of `pack`."""
        with contextlib.suppress(ValueError):
            return decode(cls, text)
        raise ValueError(f'not a handle of the backend "fastdist": {text[:100]!r}')


def communicator_of_handles(
    handles: Sequence[Handle], own: Handle, uuid: int, store: Any, timeout_s: float
) -> tuple[Communicator, int]:
    """Make a communicator of the ranks with these handles. Every rank must call.

    Args:
        uuid: a number that was not used for the first handle before.
        timeout_s: seconds to wait for the ranks, and the communicator's default.

    Returns:
        The communicator, and the number of its ranks on this machine.
    """
    if handles.count(own) != 1:
        raise ValueError(
            f"the {len(handles)} handles must hold this rank's once, got it "
            f"{handles.count(own)} times"
        )
    rank, size, first = handles.index(own), len(handles), handles[0]
    if all(handle.machine == first.machine for handle in handles):
        key = f"{first.name}/{uuid}"
        engine = HostEngine.of_processes(key, rank, size, timeout_s)
        return Communicator(engine, timeout_s), size
    root = _store_of(first, own, store, timeout_s)
    shared = c10d.PrefixStore(f"fastdist/reconfigure/{first.name}/{uuid}/", root)
    return communicator_in_store(shared, rank, size, timeout_s)


def _store_of(first: Handle, own: Handle, store: Any, timeout_s: float) -> Any:
    """Return the store in which the group of the first handle was made, without prefixes."""
    if first.store == "":
        return store
    if first.store == own.store:
        return tcp_store_of(store)
    host, port = split_address(first.store)
    patience = timedelta(seconds=timeout_s)
    try:
        return c10d.TCPStore(host, port, None, timeout=patience, wait_for_workers=False)
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        raise ClusterConfigError(
            f"rendezvous: cannot reach the store at {first.store} in {timeout_s:g} s: {reason}",
            (0,),
        ) from None
