"""The place where ranks tell each other who they are, before they are connected."""

from __future__ import annotations

import contextlib
import json
import time
from typing import Any, Protocol

from fastdist.collectives.rendezvous.store import await_told, telling_loss
from fastdist.errors import ClusterConfigError

_MOST_SHOWN = 1000  # letters of another rank's reason
_GO_ON = "go on"
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.002, 0.05  # between two looks into a store


class Bootstrap(Protocol):
    """The interface of an mpi4py communicator that a rendezvous uses."""

    def Get_rank(self) -> int: ...  # noqa: D102

    def Get_size(self) -> int: ...  # noqa: D102

    def allgather(self, obj: Any) -> list[Any]: ...  # noqa: D102


class StoreBoard:
    """A bootstrap over a store of torch. Every rank makes the same calls.

    Each turn ends with one decision for all ranks, that of the first who posts it: to go on, or why
    not. Only these ranks use the store, for one meeting if `is_new`, else repeatedly. `deadline` is
    on the monotonic clock, `timeout_s` the same for messages, which end with `hint`.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        size: int,
        deadline: float,
        timeout_s: float,
        hint: str = "",
        is_new: bool = False,
    ) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        self._deadline = deadline
        self._timeout_s = timeout_s
        self._hint = hint
        self._turn = -1
        self._keys: list[str] = []  # of the turn, by rank
        self._number: int = store.add(f"fastdist/rendezvous/{rank}", 1)
        if is_new and self._number > 1:
            error = ClusterConfigError(f"rendezvous: {_twice(rank)}", (rank,))
            refuse(store, rank, error)
            raise error

    def Get_rank(self) -> int:
        """Return this rank."""
        return self._rank

    def Get_size(self) -> int:
        """Return the number of ranks."""
        return self._size

    def allgather(self, obj: Any) -> list[Any]:
        """Return the objects of all ranks; JSON must be able to hold them."""
        self._turn += 1
        start = f"fastdist/{self._number}/{self._turn}"
        self._keys = [f"{start}/{rank}" for rank in range(self._size)]
        with telling_loss(self._rank):
            self._store.set(self._keys[self._rank], json.dumps([self._size, obj]))
            return self._await_all()

    def _await_all(self) -> list[Any]:
        found: dict[int, Any] = {}
        pause_s = _SHORTEST_PAUSE_S
        while True:
            for rank, key in enumerate(self._keys):
                if rank not in found and self._store.check([key]):
                    found[rank] = self._read(rank, key)
            missing = tuple(rank for rank in range(self._size) if rank not in found)
            if not missing:
                self._decide(_GO_ON)
                return [found[rank] for rank in range(self._size)]
            if self._store.check([_decision(self._number, self._turn)]):
                self._decide(_GO_ON)
            elif time.monotonic() > self._deadline:
                error = ClusterConfigError(
                    f"rendezvous: ranks {list(missing)} of {self._size} did not arrive within "
                    f"{self._timeout_s:g} s{self._hint}",
                    missing,
                )
                if self._decide(_reason(self._rank, error)):
                    raise error
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _read(self, rank: int, key: str) -> Any:
        try:
            size, found = _parsed(self._store.get(key))
            if not isinstance(size, int):
                raise ValueError("not a number of ranks")
        except ValueError:
            raise ClusterConfigError(
                f"rendezvous: another program has written into the store for rank {rank}", (rank,)
            ) from None
        if size != self._size:
            raise ClusterConfigError(
                f"rendezvous: ranks disagree on the number of ranks: rank {self._rank} expects "
                f"{self._size}, rank {rank} expects {size}",
                (rank,),
            )
        return found

    def _decide(self, own: str) -> bool:
        """Post a decision about the turn, and obey the first one: true if it is this refusal."""
        first = bytes(self._store.compare_set(_decision(self._number, self._turn), "", own))
        if first == own.encode():
            return own != _GO_ON
        if first == _GO_ON.encode():
            return False
        who, reason = None, "it does not say why"
        culprits: tuple[int, ...] = ()
        known = range(self._size)
        with contextlib.suppress(ValueError, TypeError):
            who, reason, ranks = _parsed(first)
            culprits = tuple(rank for rank in ranks if type(rank) is int and rank in known)
        shown = "".join(c if c.isprintable() else " " for c in str(reason)[:_MOST_SHOWN])
        name = f"rank {who}" if type(who) is int and who in known else "another rank"
        raise ClusterConfigError(
            f"rendezvous: {shown} ({name} gave up before rank {self._rank} was "
            f"connected){self._hint}",
            culprits,
        )

    def give_up(self, error: BaseException) -> None:
        """Tell ranks that wait or arrive later, so that they do not wait for this rank."""
        told = f"fastdist/{self._number}/told"
        with contextlib.suppress(RuntimeError):  # the store may be lost
            # Of this turn, or of the next if this one has ended.
            for turn in (self._turn, self._turn + 1):
                refuse(self._store, self._rank, error, self._number, turn)
            if self._rank == 0:
                await_told(self._store, told, self._keys[1:])
            else:
                self._store.add(told, 1)


def refuse(store: Any, rank: int, error: BaseException, number: int = 1, turn: int = 0) -> None:
    """Post why a rank has given up, unless this turn of the store's meeting was decided before."""
    store.compare_set(_decision(number, turn), "", _reason(rank, error))


def refuse_other_job(store: Any) -> None:
    """Tell the ranks of another job that this job meets at the same address."""
    refuse(store, 0, ClusterConfigError(_twice(0), (0,)))


def _reason(rank: int, error: BaseException) -> str:
    text = str(error).removeprefix("rendezvous: ") or type(error).__name__
    return json.dumps([rank, text, getattr(error, "ranks", ()) or [rank]])


def _decision(number: int, turn: int) -> str:
    return f"fastdist/{number}/{turn}/decision"


def _parsed(text: Any) -> list[Any]:
    """Return a list in JSON; raise ValueError if it is none."""
    try:
        found = json.loads(bytes(text))
    except RecursionError:
        found = None
    if not isinstance(found, list):
        raise ValueError("not what a rank says")
    return found


def _twice(rank: int) -> str:
    return (
        f"rank {rank} arrived twice: two processes were given this rank, or two jobs meet at this "
        "address at the same time; give each job a port of its own"
    )
