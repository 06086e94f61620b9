"""Medians of six samples, ratios of medians, and their 95 % intervals, by order statistics.

No distribution is assumed, only that a run's samples are independent. The bench's calls are not:
what slows one call slows the next. A sample is therefore the median of a pass, in which all engines
are started anew.

- The interval of one median (Conover, Practical Nonparametric Statistics, section 3.2): half of all
  samples are below the true median, so the number of samples below it is binomial. The range of six
  samples contains the true median in 96.9 % of runs.
- The interval of a ratio between two runs (Hodges and Lehmann 1963): if the second run differs by a
  factor only, its samples divided by the factor are ordered among the first run's like shuffled
  cards, which is the distribution of Mann and Whitney's U. From the sixth smallest to the sixth
  largest of the 36 ratios is an interval that contains the factor in 95.9 % of runs.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

SAMPLES = 6  # the fewest from which the interval of a median is finite
UNSTABLE_WIDTH = 0.2  # of an interval, as a fraction of its estimate
_CUT = 6  # of the sorted ratios, as the tables of Mann and Whitney's U have it


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
    """Return the median of `SAMPLES` samples."""
    return Interval(statistics.median(samples), min(samples), max(samples))


def ratio_interval(old: Sequence[float], new: Sequence[float]) -> Interval:
    """Return the factor between two runs: the median ratio of a new sample to an old one."""
    ratios = sorted(after / before for before in old for after in new)
    return Interval(statistics.median(ratios), ratios[_CUT - 1], ratios[-_CUT])
