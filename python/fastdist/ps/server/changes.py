"""The memory that a server keeps of its clients' changes.

It holds the changes that it has applied, so that a repeated request changes nothing, and gradients
that wait until their round is committed.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import itemgetter

import numpy as np

from fastdist.ps.wire.protocol import Array, Place

OPEN, APPLIED, DISCARDED = "open", "applied", "discarded"
_FINISHED = 4096
_MAX_OPEN = 1024
_ENTRY_BYTES = 512  # overhead of a staged gradient
# Above what a client has in flight, and above the number of clients of a job.
MAX_REQUESTS = 1024
_MAX_CLIENTS = 1 << 16
# Smaller frames share memory with others that were received together, and would keep all of it.
_SHARED_BYTES = 8192

Gradient = tuple[Place, Array]


@dataclass(slots=True)
class _OpenRound:
    # Gradients with their places in the sum, by their object's number.
    staged: dict[int, list[tuple[int, Gradient]]] = field(default_factory=dict)
    nbytes: int = 0
    touched: float = 0.0  # the time of the last use, on the monotonic clock


class Rounds:
    """All rounds of a server, with up to `max_bytes` of staged gradients. Thread-safe.

    A round that is not used for `idle_s` is discarded.
    """

    def __init__(self, max_bytes: int, idle_s: float = 600.0) -> None:
        self._max_bytes = max_bytes
        self._idle_s = idle_s
        self._lock = threading.RLock()
        self._open: dict[int, _OpenRound] = {}
        self._finished: OrderedDict[int, str] = OrderedDict()  # states; OPEN: being applied

    def stage(self, round_: int, gradients: Sequence[tuple[int, Gradient]], place: int = 0) -> None:
        """Stage gradients, each with the number of its object, for a round that has not ended.

        Large arrays are kept without a copy.
        """
        staged = [
            (number, (at if isinstance(at, int) else _kept(at), _kept(gradient)))
            for number, (at, gradient) in gradients
        ]
        nbytes = sum(
            (0 if isinstance(at, int) else at.nbytes) + gradient.nbytes + _ENTRY_BYTES
            for _, (at, gradient) in staged
        )
        with self._lock:
            found = self._find(round_)
            if found is None:
                return
            total = sum(other.nbytes for other in self._open.values())
            if total + nbytes > self._max_bytes:
                raise MemoryError(
                    f"round {round_}: gradients of {total} bytes are staged, {nbytes} more exceed "
                    f"the server's limit of {self._max_bytes} (max_staged_bytes)"
                )
            for number, gradient in staged:
                found.staged.setdefault(number, []).append((place, gradient))
            found.nbytes += nbytes

    def commit(self, round_: int) -> str | dict[int, list[Gradient]]:
        """Close a round, and return the gradients of each object in the order of their places.

        Call `finish` once they are applied. If it has ended or is being applied: return its state.
        """
        with self._lock:
            found = self._find(round_)
            if found is None:
                return self._finished[round_]
            self.finish(round_, OPEN)
            in_order = ((n, sorted(all_, key=itemgetter(0))) for n, all_ in found.staged.items())
            return {number: [one for _, one in all_] for number, all_ in in_order}

    def finish(self, round_: int, state: str) -> None:
        """Record that a round is being applied, was applied, or was discarded."""
        with self._lock:
            self._open.pop(round_, None)
            self._finished[round_] = state
            while len(self._finished) > _FINISHED:
                self._finished.popitem(last=False)

    def discard(self, rounds: list[int]) -> None:
        """Drop the gradients of rounds, also later ones; applied rounds stay applied."""
        with self._lock:
            for round_ in rounds:
                if round_ not in self._finished:
                    self.finish(round_, DISCARDED)

    def stats(self) -> dict[str, int]:
        """Return the number of open rounds, and the bytes of their gradients."""
        with self._lock:
            return {
                "open": len(self._open),
                "nbytes": sum(found.nbytes for found in self._open.values()),
            }

    def _find(self, round_: int) -> _OpenRound | None:
        """Return the open round, created if unknown; None if it is finished, or being applied."""
        now = time.monotonic()
        for other, found in list(self._open.items()):
            if found.touched < now - self._idle_s:
                self.finish(other, DISCARDED)
        if round_ in self._finished:
            return None
        if round_ not in self._open and len(self._open) >= _MAX_OPEN:
            raise ValueError(f"round {round_}: {_MAX_OPEN} rounds are open already")
        found = self._open.setdefault(round_, _OpenRound())
        found.touched = now
        return found


@dataclass(slots=True)
class _Client:
    floor: int = 0
    # By the numbers of changes: bodies of replies, None while a change is running.
    replies: dict[int, bytes | None] = field(default_factory=dict)


class Deduplicator:
    """The changes that each client may still repeat. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._clients: OrderedDict[bytes, _Client] = OrderedDict()

    def begin(self, client: bytes, number: int, floor: int) -> tuple[bool, bytes | None]:
        """Begin a change if it is new: it counts as running from now on.

        The client will not repeat changes below `floor`. Returns whether it was new, and the body
        of its reply; None while it is running.
        """
        with self._lock:
            known = self._clients.setdefault(client, _Client())
            self._clients.move_to_end(client)
            while len(self._clients) > _MAX_CLIENTS:
                self._clients.popitem(last=False)
            if floor > known.floor:
                known.floor = floor
                for old in [n for n in known.replies if n < floor]:
                    del known.replies[old]
            if number < known.floor:
                return False, b""
            if number in known.replies:
                return False, known.replies[number]
            if len(known.replies) >= MAX_REQUESTS:
                raise ValueError(f"too many unanswered changes (limit {MAX_REQUESTS})")
            known.replies[number] = None
            return True, None

    def end(self, client: bytes, number: int, reply: bytes | None) -> None:
        """Store the reply to a change that was new; None if it failed and may be tried again."""
        with self._lock:
            known = self._clients.get(client)
            if known is None or number not in known.replies:
                return
            if reply is None:
                del known.replies[number]
            else:
                known.replies[number] = reply


def sums_of(staged: Sequence[Gradient], scale: np.float32) -> Iterator[Gradient]:
    """Yield what to push, as one step: all ids of a table, or each range of a variable.

    Raises ValueError if two gradients of a range differ in size.
    """
    ids: list[Array] = []
    rows: list[Array] = []
    ranges: dict[int, list[Array]] = {}
    for at, gradient in staged:
        if isinstance(at, int):
            known = ranges.setdefault(at, [])
            if known and known[0].size != gradient.size:
                raise ValueError(f"gradients of {known[0].size} and {gradient.size} elements")
            known.append(gradient)
        else:
            ids.append(at)
            rows.append(gradient)
    sums: Iterable[Gradient] = ((at, _sum(ranges.pop(at))) for at in list(ranges))
    if ids:
        sums = [(_concatenate(ids), _concatenate(rows))]
    for at, total in sums:
        yield at, total if scale == 1 else total * scale


def _sum(arrays: list[Array]) -> Array:
    """Add up by the binary tree over the arrays, which are in the order of their places."""
    while len(arrays) > 1:
        pairs = [a + b for a, b in zip(arrays[::2], arrays[1::2], strict=False)]
        arrays = pairs + arrays[2 * len(pairs) :]
    return arrays[0]


def _concatenate(arrays: Sequence[Array]) -> Array:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def _kept(array: Array) -> Array:
    return array.copy() if array.nbytes < _SHARED_BYTES else array
