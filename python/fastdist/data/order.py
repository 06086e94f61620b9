"""The order in which an epoch visits the examples of a source that is read by index."""

from __future__ import annotations

import dataclasses
import itertools
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np


class IndexOrder(Protocol):
    """Batches of indices, epoch after epoch."""

    @property
    def steps(self) -> int | None:
        """Batches per epoch; None where it cannot be known."""

    @property
    def batch_sizes(self) -> frozenset[int] | None:
        """The sizes that batches have; None where they cannot be known."""

    def batches(self, epoch: int, skip: int) -> Iterator[Sequence[Any]]:
        """An epoch's batches of indices without the first `skip`."""


@dataclasses.dataclass(frozen=True, slots=True)
class RangeOrder:
    """All indices of range(length) once per epoch, in order or in an order drawn from a seed.

    The order depends on seed and epoch alone, so it is the same for all numbers of workers.

    Attributes:
        length: number of examples.
        batch_size: examples per batch; the last may have fewer, or is dropped.
        seed: ints that, with the epoch, seed the permutation; None: in order.
    """

    length: int
    batch_size: int
    drop_remainder: bool
    seed: tuple[int, ...] | None

    @property
    def steps(self) -> int:
        """Batches per epoch."""
        whole, rest = divmod(self.length, self.batch_size)
        return whole + (1 if rest and not self.drop_remainder else 0)

    @property
    def batch_sizes(self) -> frozenset[int]:
        """The batch size, and that of the last batch."""
        last = self.length % self.batch_size
        sizes = {self.batch_size}
        if last and not self.drop_remainder:
            sizes = {last} if self.length < self.batch_size else {self.batch_size, last}
        return frozenset(sizes)

    def batches(self, epoch: int, skip: int) -> Iterator[Sequence[Any]]:
        """Ranges when in order, else slices of the permutation (int64)."""
        order: Any = range(self.length)
        if self.seed is not None:
            order = np.random.default_rng((*self.seed, epoch)).permutation(self.length)
        for step in range(skip, self.steps):
            yield order[step * self.batch_size : (step + 1) * self.batch_size]


@dataclasses.dataclass(frozen=True, slots=True)
class SampledOrder:
    """The order of a batch sampler that the user supplied.

    Every worker iterates it, so it must give the same batches in all of them; and it must repeat
    them for an epoch to be resumed. A `set_epoch` that it or its sampler has is called.

    Attributes:
        sampler: what has `set_epoch`, where anything does.
    """

    batch_sampler: Iterable[Sequence[Any]]
    sampler: Any

    @property
    def steps(self) -> int | None:
        """Batches per epoch, as the batch sampler says."""
        try:
            return len(self.batch_sampler)  # type: ignore[arg-type]
        except TypeError:
            return None

    @property
    def batch_sizes(self) -> frozenset[int] | None:
        """Not known."""
        return None

    def batches(self, epoch: int, skip: int) -> Iterator[Sequence[Any]]:
        """The sampler's batches."""
        set_epoch = getattr(self.sampler, "set_epoch", None)
        if set_epoch is not None:
            set_epoch(epoch)
        return itertools.islice(map(list, self.batch_sampler), skip, None)


def fingerprint(indices: Sequence[Any]) -> int:
    """A number by which workers tell whether they drew the same indices."""
    # Not hash(): that of strings differs from process to process.
    return zlib.crc32(repr(indices).encode())
