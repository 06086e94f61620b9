"""Rendezvous of a process group's ranks through the store that torch made for the group."""

from __future__ import annotations

import contextlib
import time
from typing import Any

from fastdist.collectives.communicator import Communicator
from fastdist.collectives.init import communicator_of
from fastdist.collectives.rendezvous.board import StoreBoard

_HINT = (
    "; make the group on all its ranks at the same time, by init_process_group or new_group with "
    'backend "fastdist" and the same ranks'
)


def tcp_store_of(store: Any) -> Any:
    """Return the TCPStore under a store, or None if there is none."""
    with contextlib.suppress(AttributeError):
        while not hasattr(store, "host"):
            store = store.underlying_store
        return store
    return None


def communicator_in_store(
    store: Any, rank: int, size: int, timeout_s: float
) -> tuple[Communicator, int]:
    """Make a communicator by rendezvous in a store; a rank that fails tells the others.

    Returns:
        The communicator, and the number of its ranks on this machine.
    """
    board = StoreBoard(store, rank, size, time.monotonic() + timeout_s, timeout_s, _HINT)
    tcp = tcp_store_of(store)
    try:
        return communicator_of(board, timeout_s, None if tcp is None else str(tcp.host))
    except BaseException as error:
        board.give_up(error)
        raise
