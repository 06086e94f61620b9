"""Buckets for engines that reduce one array at a time; gradients are copied in and out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from fastdist.cli.bench.arrays import Array, ArrayLibrary
from fastdist.cli.bench.cases import DTYPE_BYTES

_BUCKET_BYTES = 25 << 20


@dataclass(slots=True)
class Bucket:
    """A flat array, and its gradients with their parts of the array."""

    flat: Array = None
    arrays: list[Array] = field(default_factory=list)
    parts: list[Array] = field(default_factory=list)


def buckets_of(library: ArrayLibrary, arrays: Sequence[Array], dtype: str) -> list[Bucket]:
    """Split a list as DDP does: the array that fills a bucket of 25 MB closes it."""
    limit = _BUCKET_BYTES // DTYPE_BYTES[dtype]
    buckets = [Bucket()]
    filled = 0
    for array in map(library.flat, arrays):
        buckets[-1].arrays.append(array)
        filled += len(array)
        if filled >= limit:
            buckets.append(Bucket())
            filled = 0
    buckets = [bucket for bucket in buckets if bucket.arrays]
    for bucket in buckets:
        bucket.flat = library.make([sum(map(len, bucket.arrays))], dtype)
        start = 0
        for array in bucket.arrays:
            bucket.parts.append(bucket.flat[start : start + len(array)])
            start += len(array)
    return buckets


def one_after_the_other(
    library: ArrayLibrary, buckets: Sequence[Bucket], all_reduce: Callable[[Array], object]
) -> Callable[[], None]:
    """Return a call that reduces one bucket after the other."""

    def reduce() -> None:
        for bucket in buckets:
            library.copy_all(bucket.parts, bucket.arrays)
            all_reduce(bucket.flat)
            library.copy_all(bucket.arrays, bucket.parts)

    return reduce


def one_by_one(
    arrays: Sequence[Array], all_reduce: Callable[[Array], object]
) -> Callable[[], None]:
    """Return a call that reduces one array after the other, without buckets."""

    def reduce() -> None:
        for array in arrays:
            all_reduce(array)

    return reduce
