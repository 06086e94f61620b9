"""Into how many pieces a variable is cut (tf.distribute.experimental.partitioners)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


class Partitioner(Protocol):
    """Says how a variable is cut; variables are cut along their first axis only."""

    def __call__(self, shape: Sequence[int], itemsize: int) -> tuple[int, ...]:
        """Pieces along each axis.

        Args:
            shape: of the variable, at least one axis.
            itemsize: bytes of an element.
        """


@dataclass(frozen=True, slots=True)
class FixedShards:
    """As many pieces as given, or as there are rows (FixedShardsPartitioner).

    Attributes:
        num_shards: pieces.
    """

    num_shards: int

    def __post_init__(self) -> None:
        _require_positive("num_shards", self.num_shards)

    def __call__(self, shape: Sequence[int], itemsize: int) -> tuple[int, ...]:
        """Pieces along each axis."""
        del itemsize
        return _along_first(shape, self.num_shards)


@dataclass(frozen=True, slots=True)
class MinSizePartitioner:
    """As many pieces as can be of a least size, so that small variables stay whole.

    Attributes:
        min_shard_bytes: no piece is smaller, unless rows are not to be divided alike.
        max_shards: no more pieces.
    """

    min_shard_bytes: int = 256 << 10
    max_shards: int = 1

    def __post_init__(self) -> None:
        _require_positive("min_shard_bytes", self.min_shard_bytes)
        _require_positive("max_shards", self.max_shards)

    def __call__(self, shape: Sequence[int], itemsize: int) -> tuple[int, ...]:
        """Pieces along each axis."""
        pieces = math.prod(shape) * itemsize // self.min_shard_bytes
        return _along_first(shape, min(self.max_shards, pieces))


@dataclass(frozen=True, slots=True)
class MaxSizePartitioner:
    """As few pieces as can be of a largest size.

    Attributes:
        max_shard_bytes: no piece is larger, unless a single row is.
        max_shards: no more pieces, whatever their size; None: as many as it takes.
    """

    max_shard_bytes: int
    max_shards: int | None = None

    def __post_init__(self) -> None:
        _require_positive("max_shard_bytes", self.max_shard_bytes)
        if self.max_shards is not None:
            _require_positive("max_shards", self.max_shards)

    def __call__(self, shape: Sequence[int], itemsize: int) -> tuple[int, ...]:
        """Pieces along each axis."""
        row_bytes = max(1, math.prod(shape[1:]) * itemsize)
        rows = max(1, self.max_shard_bytes // row_bytes)
        pieces = -(-shape[0] // rows)
        if self.max_shards is not None:
            pieces = min(pieces, self.max_shards)
        return _along_first(shape, pieces)


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows of a variable on one server.

    Attributes:
        server: its number.
        begin: the first row.
        end: one past the last.
    """

    server: int
    begin: int
    end: int


class RoundRobin:
    """Gives variables, and their pieces, to servers in turn, in the order in which they are made.

    Args:
        servers: how many there are.
        partitioner: cuts variables; None: they stay whole.
    """

    def __init__(self, servers: int, partitioner: Partitioner | None = None) -> None:
        _require_positive("servers", servers)
        self._servers = servers
        self._partitioner = partitioner
        self._next = 0

    def place(self, shape: Sequence[int], itemsize: int) -> tuple[Piece, ...]:
        """Where the rows of the next variable are; a scalar is one row, and never cut.

        Raises:
            ValueError: the partitioner cuts along another axis than the first.
        """
        rows = shape[0] if shape else 1
        pieces = 1
        if self._partitioner is not None and shape:
            cuts = self._partitioner(shape, itemsize)
            if len(cuts) != len(shape) or math.prod(cuts[1:]) != 1 or cuts[0] < 1:
                raise ValueError(
                    f"a variable of shape {tuple(shape)} must be cut along its first axis only, "
                    f"into at least one piece, got {tuple(cuts)} from {self._partitioner}"
                )
            pieces = cuts[0]
        bounds = cut(rows, pieces)
        placed = []
        for begin, end in itertools.pairwise(bounds):
            placed.append(Piece(self._next, begin, end))
            self._next = (self._next + 1) % self._servers
        return tuple(placed)

    def everywhere(self) -> tuple[Piece, ...]:
        """A piece on each server, for a table whose ids have no limit."""
        return tuple(Piece(server, 0, 0) for server in range(self._servers))


def cut(rows: int, pieces: int) -> list[int]:
    """Where pieces begin, and the end: sizes differ by at most one, larger ones come first."""
    pieces = max(1, min(rows, pieces))
    size, larger = divmod(rows, pieces)
    return [i * size + min(i, larger) for i in range(pieces + 1)]


def _along_first(shape: Sequence[int], pieces: int) -> tuple[int, ...]:
    return (max(1, min(shape[0], pieces)), *(1 for _ in shape[1:]))


def _require_positive(name: str, value: int) -> None:
    if value < 1:
        raise ValueError(f"{name} must be at least 1, got {value}")
