"""The place where ranks tell each other who they are, before they are connected."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Sequence
from typing import Any, Protocol

from fastdist.collectives.rendezvous.store import await_told
from fastdist.errors import ClusterConfigError, FastdistError

_MOST_SHOWN = 1000  # letters of another rank's reason
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.002, 0.05  # between two looks into a store


class Bootstrap(Protocol):
    """The interface of an mpi4py communicator that a rendezvous uses."""

    def Get_rank(self) -> int:  # noqa: D102
        ...

    def Get_size(self) -> int:  # noqa: D102
        ...

    def allgather(self, obj: Any) -> list[Any]:  # noqa: D102
        ...


class StoreBoard:
    """A bootstrap over a store of torch. Every rank makes the same calls.

    Args:
        store: a store that only these ranks use.
        rank: this rank.
        size: number of ranks.
        timeout_s: seconds to wait for all ranks.
        hint: the end of messages, which says what to do.
        is_new: True if a store serves one meeting only; else the ranks may meet in it repeatedly.

    Raises:
        ClusterConfigError: the store is new, and this rank has come already.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        size: int,
        timeout_s: float,
        hint: str = "",
        is_new: bool = False,
    ) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        self._deadline = time.monotonic() + timeout_s
        self._timeout_s = timeout_s
        self._hint = hint
        self._turns = 0
        self._keys: list[str] = []  # of the last turn, by rank
        self._number: int = store.add(f"fastdist/rendezvous/{rank}", 1)
        if is_new and self._number > 1:
            self._number = 1
            error = ClusterConfigError(f"rendezvous: {_twice(rank)}", (rank,))
            self.give_up(error)
            raise error

    def Get_rank(self) -> int:
        """Return this rank."""
        return self._rank

    def Get_size(self) -> int:
        """Return the number of ranks."""
        return self._size

    def allgather(self, obj: Any) -> list[Any]:
        """Return the objects of all ranks; JSON must be able to hold them.

        Raises:
            ClusterConfigError: a rank did not arrive in time, has given up before, or disagrees on
                the number of ranks; or the store is lost.
            ValueError: a stranger has written into the store.
        """
        start = f"fastdist/{self._number}/{self._turns}"
        self._turns += 1
        self._keys = [f"{start}/{rank}" for rank in range(self._size)]
        try:
            self._store.set(self._keys[self._rank], json.dumps([self._size, obj]))
            return self._await_all()
        except RuntimeError as error:
            if isinstance(error, FastdistError):
                raise
            reason = str(error).partition("\n")[0]
            raise ClusterConfigError(
                f"rendezvous: rank {self._rank} lost the store: {reason}", (0,)
            ) from None

    def _await_all(self) -> list[Any]:
        found: dict[int, Any] = {}
        pause_s = _SHORTEST_PAUSE_S
        while True:
            for rank, key in enumerate(self._keys):
                if rank not in found and self._store.check([key]):
                    found[rank] = self._read(rank, key)
            missing = tuple(rank for rank in range(self._size) if rank not in found)
            # Later, what all have said tells each rank itself why another gives up.
            is_first = self._turns == 1
            if (missing or is_first) and self._store.check([_given_up(self._number)]):
                raise self._refused()
            if not missing:
                return [found[rank] for rank in range(self._size)]
            if time.monotonic() > self._deadline:
                raise ClusterConfigError(
                    f"rendezvous: ranks {list(missing)} of {self._size} did not arrive within "
                    f"{self._timeout_s:g} s{self._hint}",
                    missing,
                )
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _read(self, rank: int, key: str) -> Any:
        size, found = _parsed(self._store.get(key), 2)
        if not isinstance(size, int):
            raise ValueError("not the number of ranks")
        if size != self._size:
            raise ClusterConfigError(
                f"rendezvous: ranks disagree on the number of ranks: rank {self._rank} expects "
                f"{self._size}, rank {rank} expects {size}",
                (rank,),
            )
        return found

    def _refused(self) -> ClusterConfigError:
        who, reason, culprits = 0, "for a reason that it did not say", []
        with contextlib.suppress(ValueError, TypeError):
            who, reason, culprits = _parsed(self._store.get(_given_up(self._number)), 3)
            culprits = [int(rank) for rank in culprits]
        shown = "".join(c if c.isprintable() else " " for c in str(reason)[:_MOST_SHOWN])
        return ClusterConfigError(
            f"rendezvous: {shown} (rank {str(who)[:20]!s} gave up before rank {self._rank} was "
            f"connected){self._hint}",
            tuple(culprits),
        )

    def give_up(self, error: BaseException) -> None:
        """Tell ranks that wait or arrive later, so that they do not wait for this rank.

        Args:
            error: the reason; the other ranks report the reason of the first rank that gives up.
        """
        reason = str(error).removeprefix("rendezvous: ") or type(error).__name__
        told = f"fastdist/{self._number}/told"
        with contextlib.suppress(RuntimeError):  # the store may be lost
            refuse(self._store, self._rank, reason, getattr(error, "ranks", ()), self._number)
            if self._rank == 0:
                await_told(self._store, told, self._keys[1:])
            else:
                self._store.add(told, 1)


def refuse(store: Any, rank: int, reason: str, ranks: Sequence[int], number: int = 1) -> None:
    """Post why a rank has given up a meeting, unless another has done so.

    Args:
        store: the store of a `StoreBoard`.
        rank: the rank that gives up.
        reason: a text for the other ranks.
        ranks: the ranks that are the cause.
        number: the number of the meeting in its store.
    """
    if not store.check([_given_up(number)]):
        store.set(_given_up(number), json.dumps([rank, reason, list(ranks)]))


def refuse_other_job(store: Any) -> None:
    """Tell the ranks of another job that this job meets at the same address."""
    refuse(store, 0, _twice(0), (0,))


def _given_up(number: int) -> str:
    return f"fastdist/{number}/given up"


def _parsed(text: Any, length: int) -> list[Any]:
    """Return a list of so many values in JSON; raise ValueError if it is none."""
    try:
        found = json.loads(bytes(text))
    except RecursionError:
        found = None
    if not isinstance(found, list) or len(found) != length:
        raise ValueError("not what a rank says")
    return found


def _twice(rank: int) -> str:
    return (
        f"rank {rank} arrived twice: two processes were given this rank, or two jobs meet at this "
        "address at the same time; give each job a port of its own"
    )
