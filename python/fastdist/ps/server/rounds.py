"""Gradients that a server keeps until all of their round have come."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fastdist.ps.wire.frames import Array

OPEN, APPLIED, DISCARDED = "open", "applied", "discarded"
_FINISHED = 4096
_MAX_OPEN = 1024
_ENTRY_BYTES = 512  # what a gradient takes besides its values
# Frames below this size share memory with others that came with them; kept, they would keep it all.
_SHARED_BYTES = 8192


# Of a dense variable, the first element of a part, and the part's gradient; of a table, ids and
# gradients.
Gradient = tuple[Any, Array]


@dataclass(slots=True)
class _Round:
    """One that is open.

    Attributes:
        staged: of each object, what came.
        nbytes: of what is staged.
        touched: when somebody used it, on the monotonic clock.
        is_closed: it is being applied.
    """

    staged: dict[int, list[Gradient]] = field(default_factory=dict)
    nbytes: int = 0
    touched: float = 0.0
    is_closed: bool = False


@dataclass(frozen=True, slots=True)
class Sum:
    """What a complete round does to one object.

    Attributes:
        number: of the object.
        lr: learning rate; None for the update rule's own.
        staged: what came.
        scale: what the sum is multiplied by.
    """

    number: int
    lr: float | None
    staged: list[Gradient]
    scale: np.float32

    def rows(self) -> tuple[Array, Array]:
        """Ids, of which some are equal, and gradients, of a table."""
        ids, gradients = zip(*self.staged, strict=True)
        return _joined(ids), self._scaled(_joined(gradients))

    def parts(self) -> Iterator[tuple[int, Array]]:
        """First elements and gradients of the parts of a dense variable."""
        parts: dict[int, Array] = {}
        for begin, gradient in self.staged:
            known = parts.get(begin)
            parts[begin] = gradient if known is None else known + gradient
        return ((begin, self._scaled(gradient)) for begin, gradient in parts.items())

    def _scaled(self, gradient: Array) -> Array:
        return gradient if self.scale == 1 else gradient * self.scale


class Rounds:
    """All rounds of a server. Safe for several threads.

    Args:
        max_bytes: of gradients that are staged at a time.
        idle_s: a round that nobody has touched for so long is discarded.
    """

    def __init__(self, max_bytes: int, idle_s: float = 600.0) -> None:
        self._max_bytes = max_bytes
        self._idle_s = idle_s
        self._lock = threading.Lock()
        self._open: dict[int, _Round] = {}
        self._finished: OrderedDict[int, str] = OrderedDict()

    def stage(self, round_: int, gradients: Sequence[tuple[int, Gradient]]) -> None:
        """Keep gradients, unless their round has ended.

        Args:
            round_: which they are of.
            gradients: what came, each with the number of its object; kept as it is.

        Raises:
            MemoryError: too much is staged.
            ValueError: too many rounds are open.
        """
        kept = [(number, (_own(at), _own(gradient))) for number, (at, gradient) in gradients]
        nbytes = sum(_nbytes(at) + _nbytes(gradient) + _ENTRY_BYTES for _, (at, gradient) in kept)
        with self._lock:
            this = self._find(round_)
            if this is None or this.is_closed:
                return
            staged = sum(other.nbytes for other in self._open.values())
            if staged + nbytes > self._max_bytes:
                raise MemoryError(
                    f"round {round_}: gradients of {staged} bytes are staged, {nbytes} more are "
                    f"over the server's limit of {self._max_bytes} (max_staged_bytes)"
                )
            for number, gradient in kept:
                this.staged.setdefault(number, []).append(gradient)
            this.nbytes += nbytes

    def commit(self, round_: int, weight: float, lrs: dict[int, float | None]) -> str | list[Sum]:
        """All gradients of a round are there.

        Args:
            round_: which.
            weight: what sums are divided by.
            lrs: learning rates of the objects to be changed.

        Returns:
            What is to be done now: then call `finish`. Of a round that has ended, or is being
            applied, its state.
        """
        with self._lock:
            this = self._find(round_)
            if this is None:
                return self._finished[round_]
            if this.is_closed:
                return OPEN
            this.is_closed = True
        scale = np.float32(1.0 / weight)
        return [
            Sum(number, lr, this.staged[number], scale)
            for number, lr in lrs.items()
            if number in this.staged
        ]

    def finish(self, round_: int, state: str) -> None:
        """A round has been applied, or is given up."""
        with self._lock:
            self._finish(round_, state)

    def discard(self, rounds: list[int]) -> None:
        """Drop what is staged, and what will come later; applied rounds stay applied."""
        with self._lock:
            for round_ in rounds:
                this = self._open.get(round_)
                if round_ not in self._finished and not (this and this.is_closed):
                    self._finish(round_, DISCARDED)

    def stats(self) -> dict[str, int]:
        """Open rounds, and the bytes of their gradients."""
        with self._lock:
            return {
                "open": len(self._open),
                "nbytes": sum(this.nbytes for this in self._open.values()),
            }

    def _find(self, round_: int) -> _Round | None:
        """The open round; None if it is finished."""
        self._expire()
        if round_ in self._finished:
            return None
        if round_ not in self._open and len(self._open) >= _MAX_OPEN:
            raise ValueError(f"round {round_}: {_MAX_OPEN} rounds are open already")
        this = self._open.setdefault(round_, _Round())
        this.touched = time.monotonic()
        return this

    def _expire(self) -> None:
        limit = time.monotonic() - self._idle_s
        for round_, this in list(self._open.items()):
            if this.touched < limit and not this.is_closed:
                self._finish(round_, DISCARDED)

    def _finish(self, round_: int, state: str) -> None:
        self._open.pop(round_, None)
        self._finished[round_] = state
        while len(self._finished) > _FINISHED:
            self._finished.popitem(last=False)


def _joined(arrays: Sequence[Array]) -> Array:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def _nbytes(what: Any) -> int:
    return what.nbytes if isinstance(what, np.ndarray) else 0


def _own(what: Any) -> Any:
    return what.copy() if isinstance(what, np.ndarray) and what.nbytes < _SHARED_BYTES else what
