"""The ranks of communicators that are made from another one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fastdist.collectives.arguments import to_integer, to_integers
from fastdist.collectives.types import Ranks
from fastdist.errors import CollectiveMismatchError


def by_color(comm: Ranks, color: int | None, key: int, timeout: float | None) -> list[list[int]]:
    """Return the ranks of each color, in the order of their keys. Every rank must call."""
    color = None if color is None else to_integer(color, "color")
    if color is not None and color < 0:
        raise ValueError(f"color must not be negative, got {color}")
    own = np.array([[-1 if color is None else color, to_integer(key, "key")]], np.int64)
    table = np.empty((comm.world_size, 2), np.int64)
    comm.calls.all_gather(own, out=table, timeout=timeout, within="split")
    by_key = sorted(range(comm.world_size), key=lambda r: (int(table[r, 1]), r))
    colors = sorted({int(c) for c in table[:, 0] if c >= 0})
    return [[r for r in by_key if table[r, 0] == c] for c in colors]


def agreed(comm: Ranks, ranks: Sequence[int], timeout: float | None) -> list[int]:
    """Return `ranks`, which must be the same on all ranks. Every rank must call."""
    ranks = to_integers(ranks, "ranks")
    if len(set(ranks)) != len(ranks) or not all(0 <= r < comm.world_size for r in ranks):
        raise ValueError(
            f"ranks must be different numbers from 0 to {comm.world_size - 1}, got {ranks}"
        )
    everyone = comm.all_gather_object(ranks, timeout=timeout)
    if any(theirs != ranks for theirs in everyone):
        raise CollectiveMismatchError(
            f"ranks called subgroup with different ranks, seen from rank {comm.rank}:"
            + "".join(f"\n  rank {r}: {theirs}" for r, theirs in enumerate(everyone)),
            tuple(r for r, theirs in enumerate(everyone) if theirs != ranks),
        )
    return ranks


def remaining(comm: Ranks, exclude: Sequence[int]) -> list[int]:
    """Return the ranks without those in `exclude`, which must not name this rank."""
    excluded = set(to_integers(exclude, "exclude"))
    if not excluded or not excluded < set(range(comm.world_size)) or comm.rank in excluded:
        raise ValueError(
            f"exclude must be some of the ranks 0 to {comm.world_size - 1}, without this one, "
            f"{comm.rank}; got {sorted(excluded)}"
        )
    return [rank for rank in range(comm.world_size) if rank not in excluded]
