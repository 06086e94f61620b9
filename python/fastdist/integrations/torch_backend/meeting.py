"""How the ranks of a process group meet: through the store that torch made for the group."""

from __future__ import annotations

import contextlib
import json
import time
from datetime import timedelta
from typing import Any

from fastdist.errors import ClusterConfigError


class StoreBootstrap:
    """What `fastdist.init(bootstrap=)` takes, over a store of torch.

    Every rank makes the same calls.

    Args:
        store: a store of this group alone.
        rank: this rank.
        size: the number of ranks.
        timeout_s: seconds to wait for the other ranks.
    """

    def __init__(self, store: Any, rank: int, size: int, timeout_s: float) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        self._deadline = time.monotonic() + timeout_s
        self._timeout_s = timeout_s
        self._calls = 0

    def Get_rank(self) -> int:
        """Return this rank."""
        return self._rank

    def Get_size(self) -> int:
        """Return the number of ranks."""
        return self._size

    def bcast(self, obj: Any, root: int = 0) -> Any:
        """Return the root's object, which JSON can hold.

        Raises:
            ClusterConfigError: the root did not come in time.
        """
        key = f"fastdist/{self._calls}"
        self._calls += 1
        if self._rank == root:
            self._store.set(key, json.dumps(obj))
            return obj
        try:
            left = max(0.001, self._deadline - time.monotonic())
            self._store.wait([key], timedelta(seconds=left))
            return json.loads(bytes(self._store.get(key)))
        except RuntimeError as error:
            raise ClusterConfigError(
                f"rendezvous: rank {root} did not come to the process group within "
                f"{self._timeout_s:g} s, seen from rank {self._rank} ({_first_line(error)}); does "
                'it run, and does it call init_process_group or new_group with backend "fastdist" '
                "and the same ranks?",
                (root,),
            ) from None


def missing_ranks(store: Any, key: str, rank: int, size: int, timeout: timedelta) -> list[int]:
    """Wait until every rank has called; return the ranks that did not come in time.

    Rank 0 waits for all ranks, which wait for its answer.
    """
    posted = [f"{key}/{r}" for r in range(size)]
    store.set(posted[rank], "here")
    try:
        # Stores take a timeout of zero for none at all.
        store.wait(posted if rank == 0 else [f"{key}/all"], max(timeout, timedelta(milliseconds=1)))
    except RuntimeError:
        return [r for r in range(size) if not store.check([posted[r]])] or [0]
    if rank == 0:
        store.set(f"{key}/all", "here")
    return []


def host_of(store: Any) -> str | None:
    """Return the host of the TCPStore under a store, or None if there is none."""
    with contextlib.suppress(AttributeError):
        while True:
            if hasattr(store, "host"):
                return str(store.host)
            store = store.underlying_store
    return None


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
