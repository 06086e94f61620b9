"""Rendezvous of a process group's ranks through the store that torch made for the group."""

from __future__ import annotations

import contextlib
import json
import time
from datetime import timedelta
from typing import Any

from fastdist.collectives.communicator import Communicator
from fastdist.collectives.engines.torch_store import await_told
from fastdist.collectives.init import communicator_of
from fastdist.errors import ClusterConfigError

_MOST_SHOWN = 1000  # letters of another rank's reason


class StoreBootstrap:
    """A bootstrap over a torch store that only this group uses. Every rank makes the same calls."""

    def __init__(self, store: Any, rank: int, size: int, timeout_s: float) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        self._deadline = time.monotonic() + timeout_s
        self._timeout_s = timeout_s
        # A store may have served a group of this name that has ended.
        self._number: int = store.add(f"fastdist/rendezvous/{rank}", 1)
        self._given_up = f"fastdist/{self._number}/given up"
        self._told = f"fastdist/{self._number}/told"
        self._calls = 0
        self._keys: list[str] = []  # of the last call, by rank

    def Get_rank(self) -> int:
        """Return this rank."""
        return self._rank

    def Get_size(self) -> int:
        """Return the number of ranks."""
        return self._size

    def allgather(self, obj: Any) -> list[Any]:
        """Return the objects of all ranks; JSON must be able to hold them.

        Raises:
            ClusterConfigError: a rank did not arrive in time, or has given up before.
        """
        keys = [f"fastdist/{self._number}/{self._calls}/{rank}" for rank in range(self._size)]
        self._calls += 1
        self._keys = keys
        self._store.set(keys[self._rank], json.dumps(obj))
        try:
            left = max(0.001, self._deadline - time.monotonic())
            self._store.wait(keys, timedelta(seconds=left))
            has_given_up = self._store.check([self._given_up])
            given_up = self._store.get(self._given_up) if has_given_up else None
            objects = [json.loads(bytes(self._store.get(key))) for key in keys]
        except RuntimeError as error:
            raise self._failure(keys, str(error).partition("\n")[0]) from None
        if given_up is not None:
            rank, reason = json.loads(bytes(given_up))
            shown = "".join(c if c.isprintable() else " " for c in str(reason)[:_MOST_SHOWN])
            raise ClusterConfigError(
                f"rendezvous: rank {int(rank)} gave up before rank {self._rank} was connected "
                f"({shown}); make the process group again on all ranks",
                (int(rank),),
            )
        return objects

    def give_up(self, error: BaseException) -> None:
        """Tell ranks that arrive later, so that they do not wait for this rank.

        Args:
            error: the reason; the other ranks report the reason of the first rank that gives up.
        """
        reason = str(error).removeprefix("rendezvous: ") or type(error).__name__
        with contextlib.suppress(RuntimeError):  # the store may be lost
            if not self._store.check([self._given_up]):
                self._store.set(self._given_up, json.dumps([self._rank, reason]))
            if self._rank == 0:
                await_told(self._store, self._told, self._keys[1:])
            else:
                self._store.add(self._told, 1)

    def _failure(self, keys: list[str], cause: str) -> ClusterConfigError:
        missing: tuple[int, ...] = ()
        with contextlib.suppress(RuntimeError):  # the store may be lost
            missing = tuple(rank for rank, key in enumerate(keys) if not self._store.check([key]))
        who = f"ranks {list(missing)} did" if missing else "other ranks did"
        return ClusterConfigError(
            f"rendezvous: {who} not come to the process group within {self._timeout_s:g} s, seen "
            f"from rank {self._rank} ({cause}); do they run, and do they call init_process_group "
            'or new_group with backend "fastdist" and the same ranks?',
            missing,
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
    bootstrap = StoreBootstrap(store, rank, size, timeout_s)
    tcp = tcp_store_of(store)
    try:
        return communicator_of(bootstrap, timeout_s, None if tcp is None else str(tcp.host))
    except BaseException as error:
        bootstrap.give_up(error)
        raise
