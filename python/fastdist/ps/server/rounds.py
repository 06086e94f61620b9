"""Gradients that a server stages until their round is committed."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fastdist.ps.wire.batches import Place
from fastdist.ps.wire.frames import Array

OPEN, APPLIED, DISCARDED = "open", "applied", "discarded"
_FINISHED = 4096
_MAX_OPEN = 1024
_ENTRY_BYTES = 512  # overhead of a staged gradient
# Smaller frames share memory with others that were received together, and would keep all of it.
_SHARED_BYTES = 8192

Gradient = tuple[Place, Array]


@dataclass(slots=True)
class _OpenRound:
    """A round that is neither applied nor discarded.

    Attributes:
        staged: the gradients of each object, by its number.
        nbytes: the staged gradients' size.
        touched: time of the last use, on the monotonic clock.
        is_closed: True while the round is being applied.
    """

    staged: dict[int, list[Gradient]] = field(default_factory=dict)
    nbytes: int = 0
    touched: float = 0.0
    is_closed: bool = False


@dataclass(frozen=True, slots=True)
class StagedUpdate:
    """The update of one object when its round is committed.

    Attributes:
        number: the object's number.
        lr: learning rate; None for the update rule's own.
        staged: the gradients.
        scale: factor of their sum.
    """

    number: int
    lr: float | None
    staged: list[Gradient]
    scale: np.float32

    def gradients(self) -> Iterator[Gradient]:
        """Yield what to push, as one step: all ids of a table, or each range of a variable."""
        ids: list[Array] = []
        rows: list[Array] = []
        ranges: dict[int, Array] = {}
        for at, gradient in self.staged:
            if isinstance(at, int):
                known = ranges.get(at)
                if known is not None and known.size != gradient.size:
                    raise ValueError(f"gradients of {known.size} and {gradient.size} elements")
                ranges[at] = gradient if known is None else known + gradient
            else:
                ids.append(at)
                rows.append(gradient)
        if ids:
            yield _concatenate(ids), self._scaled(_concatenate(rows))
        for begin, gradient in ranges.items():
            yield begin, self._scaled(gradient)

    def _scaled(self, gradient: Array) -> Array:
        return gradient if self.scale == 1 else gradient * self.scale


class Rounds:
    """All rounds of a server. Thread-safe.

    Args:
        max_bytes: limit for all staged gradients.
        idle_s: a round that is not used for this long is discarded.
    """

    def __init__(self, max_bytes: int, idle_s: float = 600.0) -> None:
        self._max_bytes = max_bytes
        self._idle_s = idle_s
        self._lock = threading.Lock()
        self._open: dict[int, _OpenRound] = {}
        self._finished: OrderedDict[int, str] = OrderedDict()

    def stage(self, round_: int, gradients: Sequence[tuple[int, Gradient]]) -> None:
        """Stage gradients for a round; a round that has ended ignores them.

        Args:
            round_: the round's number.
            gradients: each with the number of its object. Large arrays are kept without a copy.

        Raises:
            MemoryError: the staged gradients would exceed the limit.
            ValueError: too many rounds are open.
        """
        staged = [
            (number, (_copy_if_small(at), _copy_if_small(gradient)))
            for number, (at, gradient) in gradients
        ]
        nbytes = sum(_nbytes(at) + _nbytes(gradient) + _ENTRY_BYTES for _, (at, gradient) in staged)
        with self._lock:
            found = self._find(round_)
            if found is None or found.is_closed:
                return
            total = sum(other.nbytes for other in self._open.values())
            if total + nbytes > self._max_bytes:
                raise MemoryError(
                    f"round {round_}: gradients of {total} bytes are staged, {nbytes} more exceed "
                    f"the server's limit of {self._max_bytes} (max_staged_bytes)"
                )
            for number, gradient in staged:
                found.staged.setdefault(number, []).append(gradient)
            found.nbytes += nbytes

    def commit(
        self, round_: int, weight: float, lrs: dict[int, float | None]
    ) -> str | list[StagedUpdate]:
        """Close a round whose gradients have all arrived.

        Args:
            round_: the round's number.
            weight: divisor of the sums.
            lrs: learning rates of the objects to change.

        Returns:
            The updates to apply before calling `finish`. For a round that has ended or is being
            applied: its state.
        """
        with self._lock:
            found = self._find(round_)
            if found is None:
                return self._finished[round_]
            if found.is_closed:
                return OPEN
            found.is_closed = True
        scale = np.float32(1.0 / weight)
        return [
            StagedUpdate(number, lr, found.staged[number], scale)
            for number, lr in lrs.items()
            if number in found.staged
        ]

    def finish(self, round_: int, state: str) -> None:
        """Record that a round has been applied, or was discarded."""
        with self._lock:
            self._finish(round_, state)

    def discard(self, rounds: list[int]) -> None:
        """Drop the gradients of rounds, also later ones; applied rounds stay applied."""
        with self._lock:
            for round_ in rounds:
                found = self._open.get(round_)
                if round_ not in self._finished and not (found and found.is_closed):
                    self._finish(round_, DISCARDED)

    def stats(self) -> dict[str, int]:
        """Return the number of open rounds, and the bytes of their gradients."""
        with self._lock:
            return {
                "open": len(self._open),
                "nbytes": sum(found.nbytes for found in self._open.values()),
            }

    def _find(self, round_: int) -> _OpenRound | None:
        """Return the open round, created if unknown; None if it is finished."""
        self._expire()
        if round_ in self._finished:
            return None
        if round_ not in self._open and len(self._open) >= _MAX_OPEN:
            raise ValueError(f"round {round_}: {_MAX_OPEN} rounds are open already")
        found = self._open.setdefault(round_, _OpenRound())
        found.touched = time.monotonic()
        return found

    def _expire(self) -> None:
        limit = time.monotonic() - self._idle_s
        for round_, found in list(self._open.items()):
            if found.touched < limit and not found.is_closed:
                self._finish(round_, DISCARDED)

    def _finish(self, round_: int, state: str) -> None:
        self._open.pop(round_, None)
        self._finished[round_] = state
        while len(self._finished) > _FINISHED:
            self._finished.popitem(last=False)


def _concatenate(arrays: Sequence[Array]) -> Array:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def _nbytes(what: Any) -> int:
    return what.nbytes if isinstance(what, np.ndarray) else 0


def _copy_if_small(what: Any) -> Any:
    return what.copy() if isinstance(what, np.ndarray) and what.nbytes < _SHARED_BYTES else what
