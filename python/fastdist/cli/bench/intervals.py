"""Medians, ratios of medians, and their 95 % confidence intervals, by order statistics.

No distribution is assumed, only that a run's samples are independent. The bench's calls are not:
what slows one call slows the next. A sample is therefore the median of a pass, in which all engines
are started anew.

- The interval of one median (Conover, Practical Nonparametric Statistics, section 3.2): half of all
  samples are below the true median, so the number of samples below it is binomial.
- The interval of a ratio between two runs (Hodges and Lehmann 1963): if the second run differs by a
  factor only, its samples divided by the factor are ordered among the first run's like shuffled
  cards, which is the distribution of Mann and Whitney's U.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

Values = np.ndarray[tuple[int], np.dtype[np.float64]]

LEAST_SAMPLES = 6  # from which on the interval of a median is finite
UNSTABLE_WIDTH = 0.2  # of an interval, as a fraction of its estimate
_TAIL = 0.025


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate, and the ends of its interval."""

    estimate: float
    low: float
    high: float

    @property
    def is_unstable(self) -> bool:
        """True if the interval is wider than `UNSTABLE_WIDTH` of the estimate."""
        return self.high - self.low > UNSTABLE_WIDTH * self.estimate


def median_interval(samples: Sequence[float]) -> Interval:
    """Return the median; the interval is 0 to infinity for fewer than `LEAST_SAMPLES` samples."""
    number = len(samples)
    chances = [math.comb(number, k) / 2.0**number for k in range(number + 1)]
    return _between(np.sort(samples), chances)


def ratio_interval(old: Sequence[float], new: Sequence[float]) -> Interval:
    """Return the factor between two runs: the median ratio of a new sample to an old one."""
    ratios = np.sort(np.divide.outer(np.asarray(new), np.asarray(old)), axis=None)
    ways = _rank_sums(len(old), len(new))
    return _between(ratios, (ways / ways.sum()).tolist())


def _between(ordered: Values, chances: list[float]) -> Interval:
    """Return the narrowest interval between two of the values in ascending order.

    `chances` has the chance, by k, that exactly k values are below the true value.
    """
    estimate = float(np.median(ordered))
    cut, chance = 0, chances[0]
    while chance <= _TAIL:
        cut += 1
        chance += chances[cut]
    if not cut:
        return Interval(estimate, 0.0, math.inf)
    return Interval(estimate, float(ordered[cut - 1]), float(ordered[-cut]))


def _rank_sums(old: int, new: int) -> Values:
    """Count, for each U, the orders of `old` and `new` samples in which U pairs are new > old."""
    # ways[n, s]: how n of the ranks so far have the sum s
    ways = np.zeros((new + 1, (old + new) * (old + new + 1) // 2 + 1))
    ways[0, 0] = 1
    for rank in range(1, old + new + 1):
        without = ways.copy()
        ways[1:, rank:] += without[:-1, :-rank]
    least = new * (new + 1) // 2
    counts: Values = ways[new, least : least + old * new + 1]
    return counts
