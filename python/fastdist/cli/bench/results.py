"""Results of a run of the bench: figures from times, floors, warnings, a sentence per peer.

Intervals contain the true figure in 95 % of runs, by order statistics. No distribution is assumed,
only that a run's samples are independent. The bench's calls are not: what slows one call slows the
next. A sample is therefore the median of a pass, in which all engines are started anew.

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
from dataclasses import dataclass, field, replace

import numpy as np

import fastdist._core as _core
from fastdist.cli.bench.cases import COLLECTIVES, DTYPE_BYTES, Case, buffer_elements
from fastdist.cli.machine_facts import usable_cores

# Quiet machines give ratios of p99 to p50 from 1.1 to 3.
_WIDE_SPREAD = 5.0
_FEW_CALLS = 20
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


@dataclass(frozen=True, slots=True)
class Measurement:
    """One engine's figures for one case: times in µs of the slowest rank."""

    engine: str
    p50_us: float = 0.0
    p99_us: float = 0.0
    iterations: int = 0
    wrong: int = 0  # wrong elements over all ranks
    unsupported: str = ""  # reason for missing figures, which are then 0
    host_us: float | None = None  # median time until the call returns, on GPUs
    host_p99_us: float | None = None
    graph_us: float | None = None  # median time of a replay of a graph with the call, on GPUs
    no_graph: str = ""  # reason why the call could not be captured in a graph
    samples_us: tuple[float, ...] = ()  # of a report: p50 of each pass; `p50_us` is their median

    @property
    def interval(self) -> Interval:
        """The interval of `p50_us` in a report."""
        return median_interval(self.samples_us or (self.p50_us,))


@dataclass(frozen=True, slots=True)
class Row:
    """All engines' figures for one case."""

    case: Case
    ranks: int
    floor_us: float  # least time for the traffic in memory; 0 if each rank has a GPU of its own
    ours: Measurement
    others: tuple[Measurement, ...]  # peers
    fits_caches: bool = False  # all ranks' buffers; the memory's speed is then no floor

    @property
    def measurements(self) -> tuple[Measurement, ...]:
        """The figures of fastdist, then of the others."""
        return (self.ours, *self.others)

    @property
    def has_floor(self) -> bool:
        """True if the memory's speed is a floor."""
        return self.floor_us > 0 and not self.fits_caches

    @property
    def floor_percent(self) -> float:
        """fastdist's speed as a percentage of the floor's."""
        return 100 * self.floor_us / self.ours.p50_us

    def algbw(self, time_us: float) -> float:
        """Return the bytes of a call divided by its time, in GB/s."""
        return self.case.bytes / time_us / 1e3

    def busbw(self, time_us: float) -> float:
        """Return the bus bandwidth of a call as in nccl-tests, in GB/s."""
        return self.algbw(time_us) * COLLECTIVES[self.case.collective].bus_factor(self.ranks)

    def times_as_fast(self, other: Measurement, figure: str = "p50_us") -> float | None:
        """Return another engine's time divided by fastdist's; None if either is missing."""
        ours, theirs = getattr(self.ours, figure), getattr(other, figure)
        return theirs / ours if ours and theirs else None

    def ratio(self, other: Measurement) -> Interval:
        """Return another engine's time divided by fastdist's, from the ratio of each pass."""
        pairs = zip(other.samples_us, self.ours.samples_us, strict=True)
        return median_interval([theirs / ours for theirs, ours in pairs])


@dataclass(frozen=True, slots=True)
class Placement:
    """The GPUs of a run on one machine."""

    names: tuple[str, ...]  # of all GPUs
    of_rank: tuple[int, ...]  # GPU of each rank

    @property
    def sharing(self) -> str:
        """`2 ranks share GPU 0`, for every shared GPU; empty if each rank has its own GPU."""
        counts = {gpu: self.of_rank.count(gpu) for gpu in sorted(set(self.of_rank))}
        return ", ".join(f"{n} ranks share GPU {gpu}" for gpu, n in counts.items() if n > 1)

    def __str__(self) -> str:
        used = [self.names[gpu] for gpu in sorted(set(self.of_rank))]
        kinds = ", ".join(f"{used.count(name)} x {name}" for name in dict.fromkeys(used))
        return "; ".join(filter(None, (kinds, self.sharing)))


def place_ranks(ranks: int) -> Placement:
    """Return the GPUs of the ranks of a run, as `Gpu` chooses them."""
    devices = _core.cuda_devices()
    if not devices:
        raise ValueError(f"no GPU: {_core.why_no_cuda()}")
    of_rank = tuple(rank % len(devices) for rank in range(ranks))
    return Placement(tuple(device.name for device in devices), of_rank)


@dataclass(slots=True)
class Report:
    """A run: the machine, the engines, and a row per case."""

    ranks: int
    machine: dict[str, str]  # facts by name
    engines: dict[str, str]  # version by engine
    missing: dict[str, str]  # pip command by requested peer that is not installed
    copy_gb_per_s: float = 0.0  # that all ranks read and write when they copy at the same time
    rows: list[Row] = field(default_factory=list)
    placement: Placement | None = None  # the ranks' GPUs; None on CPUs
    failed: dict[str, str] = field(default_factory=dict)  # reason by peer that failed to start

    @property
    def machine_text(self) -> str:
        """The processor, the memory and the versions, in a line."""
        facts = self.machine
        return (
            f"{facts['processor']}, {facts['cores']} cores, {facts['cache']} cache, "
            f"{facts['memory']}; Linux {facts['kernel']}, Python {facts['python']}"
        )

    @property
    def warnings(self) -> list[str]:
        """Wrong results, unstable cases, and warnings of a busy machine and of few calls."""
        warnings = [
            f"WRONG RESULTS: {found.engine} got {found.wrong} elements of {row.case.title} wrong"
            for row in self.rows
            for found in row.measurements
            if found.wrong
        ]
        if unstable := [row.case.title for row in self.rows if row.ours.interval.is_unstable]:
            share = f"{len(unstable)} of {len(self.rows)} cases"
            warnings.append(f"{share} are unstable: {', '.join(unstable)}")
        why_wide = "something else, such as another program, took a core during calls"
        if self.ranks > (cores := usable_cores()):
            why_wide = f"{self.ranks} ranks take turns on {cores} cores"
        wide = [row for row in self.rows if row.ours.p99_us > _WIDE_SPREAD * row.ours.p50_us]
        few = [row for row in self.rows if row.ours.iterations < _FEW_CALLS]
        for rows, what, why in (
            (wide, f"busy machine: p99 is more than {_WIDE_SPREAD:g} times p50", why_wide),
            (few, f"too few calls: fewer than {_FEW_CALLS}", "--time-s or --iters gives more"),
        ):
            titles = ", ".join(row.case.title for row in rows)
            where = "all of them" if len(rows) == len(self.rows) > 1 else titles
            if rows:
                warnings.append(f"{what} at {where}; {why}")
        return warnings

    @property
    def cautions(self) -> list[str]:
        """Failed peers and the warnings."""
        failed = [f"{name} failed and is left out: {why}" for name, why in self.failed.items()]
        return failed + self.warnings

    @property
    def sentences(self) -> list[str]:
        """A sentence per peer."""
        sentences = []
        _, *peers = self.engines.items()
        for name, version in peers:
            ratios = {
                row.case.title: row.ratio(other)
                for row in self.rows
                for other in row.others
                if other.engine == name and not other.unsupported
            }
            if not ratios:
                sentences.append(f"{version} supports none of the cases.")
                continue
            ordered = sorted((ratio.estimate, title) for title, ratio in ratios.items())
            (least, least_title), (most, most_title) = ordered[0], ordered[-1]
            slower = [title for title, ratio in ratios.items() if ratio.high < 1]
            faster = sum(ratio.low > 1 for ratio in ratios.values())
            named = f" ({', '.join(slower)})" if slower else ""
            undecided = len(ratios) - faster - len(slower)
            median = digits(statistics.median(estimate for estimate, _ in ordered))
            sentences.append(
                f"{version} takes {median} times as long as fastdist in the median of "
                f"{len(ratios)} cases, from {digits(least)} ({least_title}) to {digits(most)} "
                f"({most_title}); fastdist is faster in {faster}, slower in "
                f"{len(slower) or 'none'}{named}"
                + (f", and the intervals of {undecided} leave it open." if undecided else ".")
            )
        return sentences


def slowest_rank(times_ns: Sequence[Sequence[int]]) -> list[int]:
    """Return the longest of the ranks' times for each iteration."""
    return [max(ranks) for ranks in zip(*times_ns, strict=True)]


def median_us(times_ns: Sequence[int]) -> float | None:
    """Return the median in microseconds; None without times."""
    return statistics.median(times_ns) / 1e3 if times_ns else None


def p99_us(times_ns: Sequence[int]) -> float | None:
    """Return the 99th percentile in microseconds; None without times."""
    return float(np.percentile(times_ns, 99, method="higher")) / 1e3 if times_ns else None


def combined(rows: Sequence[Row]) -> Row:
    """Combine the rows of one case from several passes: medians, and the sums of counts.

    Engines that the last row lacks are left out.
    """

    def combine(name: str) -> Measurement:
        passes = [m for row in rows for m in row.measurements if m.engine == name]
        if unsupported := next((m for m in passes if m.unsupported), None):
            return unsupported
        samples_us = tuple(m.p50_us for m in passes)
        return Measurement(
            engine=name,
            p50_us=statistics.median(samples_us),
            p99_us=statistics.median(m.p99_us for m in passes),
            iterations=sum(m.iterations for m in passes),
            wrong=sum(m.wrong for m in passes),
            samples_us=samples_us,
        )

    ours, *others = (combine(m.engine) for m in rows[-1].measurements)
    floor_us = statistics.median(row.floor_us for row in rows)
    return replace(rows[-1], floor_us=floor_us, ours=ours, others=tuple(others))


def floor_us(case: Case, world_size: int, copy_gb_per_s: float) -> float:
    """Return the time of a case's minimum memory traffic at the copy bandwidth."""
    buffers = COLLECTIVES[case.collective].floor_buffers(world_size)
    return buffers * case.bytes / copy_gb_per_s / 1e3


def buffer_bytes(case: Case, world_size: int) -> int:
    """Return the total size of all ranks' buffers."""
    if case.model:
        return world_size * case.bytes
    ranks = range(world_size)
    elements = (buffer_elements(case.collective, case.count, rank, world_size) for rank in ranks)
    return sum(map(sum, elements)) * DTYPE_BYTES[case.dtype]


def digits(ratio: float) -> str:
    """Format a ratio with two digits or more."""
    return f"{ratio:.2f}" if ratio < 0.995 else f"{ratio:.1f}" if ratio < 9.95 else f"{ratio:.0f}"


def format_time(us: float) -> str:
    """Format microseconds in the unit that suits: `12.3 µs`."""
    for limit, unit in ((1e6, "s"), (1e3, "ms"), (1, "µs")):
        if us >= limit:
            return f"{us / limit:.3g} {unit}"
    return f"{us * 1e3:.3g} ns"
