"""Buckets for engines that reduce one array at a time; gradients are copied in and out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from fastdist.cli.bench.arrays import Array, ArrayLibrary
from fastdist.cli.bench.cases import DTYPE_BYTES


@dataclass(slots=True)
class Bucket:
    """A flat array, and its gradients with their parts of the array."""

    flat: Array = None
    arrays: list[Array] = field(default_factory=list)
    parts: list[Array] = field(default_factory=list)


class Buckets:
    """Splits a list as DDP does: the array that fills a bucket closes it."""

    def __init__(
        self, library: ArrayLibrary, arrays: Sequence[Array], dtype: str, bucket_bytes: int
    ) -> None:
        self._library = library
        limit = bucket_bytes // DTYPE_BYTES[dtype]
        self._buckets = [Bucket()]
        filled = 0
        for array in arrays:
            self._buckets[-1].arrays.append(library.flat(array))
            filled += len(library.flat(array))
            if filled >= limit:
                self._buckets.append(Bucket())
                filled = 0
        self._buckets = [bucket for bucket in self._buckets if bucket.arrays]
        for bucket in self._buckets:
            bucket.flat = library.make([sum(map(len, bucket.arrays))], dtype)
            start = 0
            for array in bucket.arrays:
                bucket.parts.append(bucket.flat[start : start + len(array)])
                start += len(array)

    def __iter__(self) -> Iterator[Bucket]:
        return iter(self._buckets)

    def reduced(self, all_reduce: Callable[[Array], object]) -> Callable[[], None]:
        """Return a call that reduces one bucket after the other."""
        copy_all = self._library.copy_all

        def reduce() -> None:
            for bucket in self._buckets:
                copy_all(bucket.parts, bucket.arrays)
                all_reduce(bucket.flat)
                copy_all(bucket.arrays, bucket.parts)

        return reduce


def one_by_one(
    arrays: Sequence[Array], all_reduce: Callable[[Array], object]
) -> Callable[[], None]:
    """Return a call that reduces one array after the other, without buckets."""

    def reduce() -> None:
        for array in arrays:
            all_reduce(array)

    return reduce
