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
from functools import cache
from itertools import accumulate

import numpy as np

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
    return _between(samples, [math.comb(number, below) for below in range(number + 1)])


def ratio_interval(old: Sequence[float], new: Sequence[float]) -> Interval:
    """Return the factor between two runs: the median ratio of a new sample to an old one."""
    ratios = [after / before for before in old for after in new]
    return _between(ratios, _orders(len(old), len(new)))


@cache
def _orders(old: int, new: int) -> list[float]:
    """Count the orders of samples by the pairs that are new > old: Gauss' binomial coefficient."""
    ways, q = np.poly1d([1.0]), np.poly1d([1.0, 0.0])
    for number in range(1, new + 1):
        ways, _ = ways * (q ** (old + number) - 1) / (q**number - 1)
    return [float(count) for count in ways.coeffs]


def _between(values: Sequence[float], ways: Sequence[float]) -> Interval:
    """Return the median and the narrowest interval between two of the values.

    `ways` has in how many ways, all alike, exactly 0, 1, 2 … values are below the true value.
    """
    ordered = np.sort(values)
    estimate = float(np.median(ordered))
    rare = _TAIL * sum(ways)
    cut = sum(below <= rare for below in accumulate(ways))
    if not cut:
        return Interval(estimate, 0.0, math.inf)
    return Interval(estimate, float(ordered[cut - 1]), float(ordered[-cut]))
