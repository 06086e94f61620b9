"""The order in which an epoch visits the examples of a source that is read by index."""

from __future__ import annotations

import dataclasses
import itertools
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from fastdist.data.drawing import epoch_seed, with_own_draws
from fastdist.data.streams import length_of


@dataclasses.dataclass(frozen=True, slots=True)
class RangeOrder:
    """All indices of range(length) once per epoch, ascending or in a seeded random order.

    The order depends on seed and epoch only, so it is the same for all numbers of workers.
    """

    length: int
    batch_size: int
    drop_remainder: bool  # leave out a last batch with fewer examples
    seed: tuple[int, ...] | None  # of the permutation, with the epoch; None: ascending

    @property
    def steps(self) -> int:
        """Batches per epoch."""
        whole, rest = divmod(self.length, self.batch_size)
        return whole + (1 if rest and not self.drop_remainder else 0)

    @property
    def equal_size(self) -> int | None:
        """The size of all batches; None if the last batch is smaller than others."""
        if self.drop_remainder or not self.length % self.batch_size:
            return self.batch_size
        return self.length if self.length < self.batch_size else None

    def batches(self, epoch: int, skip: int) -> Iterator[Sequence[Any]]:
        """Yield an epoch's batches of indices without the first `skip`.

        They are ranges if the order is ascending, else slices of the permutation (int64).
        """
        order: Any = range(self.length)
        if self.seed is not None:
            order = np.random.default_rng((*self.seed, epoch)).permutation(self.length)
        for step in range(skip, self.steps):
            yield order[step * self.batch_size : (step + 1) * self.batch_size]


@dataclasses.dataclass(frozen=True, slots=True)
class SampledOrder:
    """The order of a batch sampler that the user supplied.

    It must give the same batches on all workers, and repeat them where an epoch is resumed, as a
    sampler does that draws from torch's default generator: it has a stream of its own per epoch.
    """

    batch_sampler: Iterable[Sequence[Any]]
    seed: tuple[int, ...]  # of the stream, with the epoch

    equal_size = None  # unknown

    @property
    def steps(self) -> int | None:
        """The length of the batch sampler; None if it has no length."""
        return length_of(self.batch_sampler)

    def batches(self, epoch: int, skip: int) -> Iterator[Sequence[Any]]:
        """Yield the batch sampler's batches without the first `skip`."""
        for sampler in (self.batch_sampler, getattr(self.batch_sampler, "sampler", None)):
            if (set_epoch := getattr(sampler, "set_epoch", None)) is not None:
                set_epoch(epoch)
                break
        batches = with_own_draws(
            lambda: map(list, self.batch_sampler), epoch_seed(self.seed, epoch)
        )
        return itertools.islice(batches, skip, None)


IndexOrder = RangeOrder | SampledOrder


def fingerprint(indices: Sequence[Any]) -> int:
    """Hash indices to a number that workers compare."""
    # Python's hash() of strings differs between processes.
    return zlib.crc32(repr(indices).encode())
