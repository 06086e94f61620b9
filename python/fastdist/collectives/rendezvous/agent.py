"""Agreement on a rendezvous in the store of torchrun's agent, which has served earlier ones.

When nodes come and go, the agents start their ranks again, and the store keeps what earlier ranks
have posted. Nothing in the environment tells one rendezvous from the next: agents count restarts
each for itself. So each rank posts a random number. Rank 0 answers with a name for the rendezvous
and the numbers that it has seen, and again with another name if a number has changed, since the
earlier one may be of a rank that has ended. Once all ranks have accepted a name, it is agreed.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import time
from typing import Any

from fastdist.errors import ClusterConfigError

_POLL_S = 0.02


def agree_on_name(store: Any, rank: int, size: int, deadline: float) -> str:
    """Return a name that is the same on all ranks, and was never used. Every rank must call."""
    return _lead(store, size, deadline) if rank == 0 else _follow(store, rank, deadline)


def _lead(store: Any, size: int, deadline: float) -> str:
    arrived = [f"number/{rank}" for rank in range(1, size)]
    accepted = [f"accepted/{rank}" for rank in range(1, size)]
    name = ""
    numbers: list[str] | None = None
    while True:
        found = _values(store, arrived)
        if found is not None and found != numbers:
            name, numbers = secrets.token_hex(8), found
            store.set("invitation", json.dumps([name, *numbers]))
        if name and _values(store, accepted) == [name] * (size - 1):
            store.set("agreed", name)
            return name
        missing = tuple(n for n, key in enumerate(arrived, 1) if not store.check([key]))
        _wait(deadline, missing)


def _follow(store: Any, rank: int, deadline: float) -> str:
    number, name = secrets.token_hex(8), ""
    store.set(f"number/{rank}", number)
    while True:
        invited, *numbers = _invitation(store)
        if invited != name and numbers[rank - 1 : rank] == [number]:
            name = str(invited)
            store.set(f"accepted/{rank}", name)
        if name and _values(store, ["agreed"]) == [name]:
            return name
        _wait(deadline, (0,))


def _invitation(store: Any) -> list[Any]:
    with contextlib.suppress(ValueError, RecursionError):
        found = json.loads((_values(store, ["invitation"]) or ["[]"])[0])
        if isinstance(found, list) and found:
            return found
    return [""]


def _values(store: Any, keys: list[str]) -> list[str] | None:
    """Return the values of the keys, or None if one of them is not there."""
    if not keys:
        return []
    if not store.check(keys):
        return None
    return [bytes(value).decode(errors="replace") for value in store.multi_get(keys)]


def _wait(deadline: float, missing: tuple[int, ...]) -> None:
    if time.monotonic() > deadline:
        who = f"ranks {list(missing)}" if missing else "other ranks"
        raise ClusterConfigError(
            f"rendezvous: {who} did not arrive in time at the store of torchrun's agent", missing
        )
    time.sleep(_POLL_S)
