"""Partitioners: the number of shards of a variable (tf.distribute.experimental.partitioners)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


class Partitioner(Protocol):
    """Returns the number of pieces of a variable; variables are cut along their first axis only."""

    def __call__(self, shape: Sequence[int], itemsize: int) -> tuple[int, ...]:
        """Return the number of pieces along each axis.

        Args:
            shape: the variable's shape, at least one axis.
            itemsize: bytes of an element.
        """


@dataclass(frozen=True, slots=True)
class FixedShards:
    """A fixed number of pieces, at most one per row (FixedShardsPartitioner).

    Attributes:
        num_shards: pieces.

    Examples:
        >>> from fastdist import ps
        >>> ps.FixedShards(2)((10, 4), 4)
        (2, 1)
    """

    num_shards: int

    def __post_init__(self) -> None:
        _require_positive(num_shards=self.num_shards)

    def __call__(self, shape: Sequence[int], itemsize: int) -> tuple[int, ...]:
        """Return the number of pieces along each axis."""
        return _along_first(shape, self.num_shards)


@dataclass(frozen=True, slots=True)
class MinSizePartitioner:
    """The most pieces of at least a minimum size, so that small variables stay whole.

    Attributes:
        min_shard_bytes: minimum size of a piece, up to rows that do not divide evenly.
        max_shards: maximum number of pieces.

    Examples:
        >>> from fastdist import ps
        >>> ps.MinSizePartitioner(1024, max_shards=4)((1024, 8), 4)
        (4, 1)
    """

    min_shard_bytes: int = 256 << 10
    max_shards: int = 1

    def __post_init__(self) -> None:
        _require_positive(min_shard_bytes=self.min_shard_bytes, max_shards=self.max_shards)

    def __call__(self, shape: Sequence[int], itemsize: int) -> tuple[int, ...]:
        """Return the number of pieces along each axis."""
        pieces = math.prod(shape) * itemsize // self.min_shard_bytes
        return _along_first(shape, min(self.max_shards, pieces))


@dataclass(frozen=True, slots=True)
class MaxSizePartitioner:
    """The fewest pieces of at most a maximum size.

    Attributes:
        max_shard_bytes: maximum size of a piece, unless a single row is larger.
        max_shards: maximum number of pieces, whatever their size; None for no limit.

    Examples:
        >>> from fastdist import ps
        >>> ps.MaxSizePartitioner(8192)((1024, 8), 4)
        (4, 1)
    """

    max_shard_bytes: int
    max_shards: int | None = None

    def __post_init__(self) -> None:
        limit = 1 if self.max_shards is None else self.max_shards
        _require_positive(max_shard_bytes=self.max_shard_bytes, max_shards=limit)

    def __call__(self, shape: Sequence[int], itemsize: int) -> tuple[int, ...]:
        """Return the number of pieces along each axis."""
        row_bytes = max(1, math.prod(shape[1:]) * itemsize)
        rows = max(1, self.max_shard_bytes // row_bytes)
        pieces = -(-shape[0] // rows)
        return _along_first(shape, min(pieces, self.max_shards or pieces))


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows of a variable on one server."""

    server: int
    begin: int
    end: int  # one past the last


class RoundRobin:
    """Assigns variables, and their pieces, to servers in turn; without a partitioner, whole."""

    def __init__(self, servers: int, partitioner: Partitioner | None = None) -> None:
        _require_positive(servers=servers)
        self._servers = servers
        self._partitioner = partitioner
        self._next = 0

    def place(self, shape: Sequence[int], itemsize: int) -> tuple[Piece, ...]:
        """Return the pieces of the next variable; a scalar is one row, and never cut."""
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
        placed = []
        for begin, end in itertools.pairwise(piece_bounds(rows, pieces)):
            placed.append(Piece(self._next, begin, end))
            self._next = (self._next + 1) % self._servers
        return tuple(placed)

    def everywhere(self) -> tuple[Piece, ...]:
        """Return one piece per server, for a table whose ids have no limit."""
        return tuple(Piece(server, 0, 0) for server in range(self._servers))


def piece_bounds(rows: int, pieces: int) -> list[int]:
    """Return the first row of each piece, and the end; larger pieces first, by one row at most."""
    pieces = max(1, min(rows, pieces))
    size, larger = divmod(rows, pieces)
    return [i * size + min(i, larger) for i in range(pieces + 1)]


def _along_first(shape: Sequence[int], pieces: int) -> tuple[int, ...]:
    return (max(1, min(shape[0], pieces)), *(1 for _ in shape[1:]))


def _require_positive(**values: int) -> None:
    for name, value in values.items():
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
