"""The meeting of a process group's ranks: in the store that torch made for it, or by handles."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch._C import _distributed_c10d as c10d

from fastdist.cluster.address import join_address, split_address
from fastdist.collectives.communicator import Communicator
from fastdist.collectives.engines.host import HostEngine
from fastdist.collectives.init import communicator_of
from fastdist.collectives.rendezvous.board import StoreBoard
from fastdist.collectives.rendezvous.machines import machine_id
from fastdist.errors import ClusterConfigError
from fastdist.recorder.encoding import decode

_HINT = (
    "; make the group on all its ranks at the same time, by init_process_group or new_group with "
    'backend "fastdist" and the same ranks'
)
Met = tuple[Communicator, int]  # with the number of its ranks on this machine


def tcp_store_of(store: Any) -> Any:
    """Return the TCPStore under a store, or None if there is none."""
    with contextlib.suppress(AttributeError):
        while not hasattr(store, "host"):
            store = store.underlying_store
        return store
    return None


def communicator_in_store(store: Any, rank: int, size: int, timeout_s: float) -> Met:
    """Make a communicator by rendezvous in a store; a rank that fails tells the others."""
    board = StoreBoard(store, rank, size, time.monotonic() + timeout_s, timeout_s, _HINT)
    tcp = tcp_store_of(store)
    try:
        return communicator_of(board, timeout_s, None if tcp is None else str(tcp.host))
    except BaseException as error:
        board.give_up(error)
        raise


@dataclass(frozen=True, slots=True)
class Handle:
    """The facts of a rank's process group that other ranks need for `reconfigure`."""

    name: str  # random
    machine: str  # the result of `machine_id`
    store: str  # "host:port" of the TCPStore in which it was made; "" if it was another store

    @classmethod
    def of_group(cls, store: Any) -> Handle:
        """Make the handle of a group that was made in this store."""
        tcp = tcp_store_of(store)
        address = "" if tcp is None else join_address(tcp.host, tcp.port)
        return cls(secrets.token_hex(16), machine_id(), address)

    @classmethod
    def decode(cls, text: str) -> Handle:
        """Decode what `encode` has made of a handle."""
        with contextlib.suppress(ValueError):
            return decode(cls, text)
        raise ValueError(f'not a handle of the backend "fastdist": {text[:100]!r}')


def communicator_of_handles(
    handles: Sequence[Handle], own: Handle, uuid: int, store: Any, timeout_s: float
) -> Met:
    """Make a communicator of the ranks with these handles. Every rank must call.

    `uuid` is a number that was not used for the first handle before.
    """
    if handles.count(own) != 1:
        raise ValueError(
            f"the {len(handles)} handles must hold this rank's once, got it "
            f"{handles.count(own)} times"
        )
    rank, size, first = handles.index(own), len(handles), handles[0]
    if all(handle.machine == first.machine for handle in handles):
        engine = HostEngine.of_processes(f"{first.name}/{uuid}", rank, size, timeout_s)
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
