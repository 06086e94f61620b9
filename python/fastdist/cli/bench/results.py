"""Results of a run of the bench, and the computation of figures from times."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from fastdist.cli.bench.cases import DTYPE_BYTES, Case
from fastdist.cli.bench.collectives import COLLECTIVES, buffer_elements
from fastdist.cli.bench.gpu import Placement
from fastdist.cli.machine_facts import usable_cores

# Quiet machines give ratios of p99 to p50 from 1.1 to 3.
_WIDE_SPREAD = 5.0
_FEW_CALLS = 20
# A core that the ranks need is busy half of the time.
_MOST_BUSY_CORES = 0.5


@dataclass(frozen=True, slots=True)
class Measurement:
    """One engine's figures for one case: times in µs of the slowest rank."""

    engine: str  # or `engine: variant` for one of several ways to reduce a list
    p50_us: float = 0.0
    p99_us: float = 0.0
    iterations: int = 0
    wrong: int | None = None  # wrong elements over all ranks; None if nothing was checked
    unsupported: str = ""  # reason for missing figures, which are then 0
    host_us: float | None = None  # median time until the call returns, on GPUs
    host_p99_us: float | None = None
    graph_us: float | None = None  # median time of a replay of a graph with the call, on GPUs
    no_graph: str = ""  # reason why the call could not be captured in a graph
    samples_us: tuple[float, ...] = ()  # of a report: p50 of each pass; `p50_us` is their median


@dataclass(frozen=True, slots=True)
class Row:
    """All engines' figures for one case.

    The floor is the minimum time of the memory traffic, or of the traffic on the links between
    GPUs; 0 for a barrier, and if the speed is unknown.
    """

    case: Case
    ranks: int
    floor_us: float
    ours: Measurement
    others: tuple[Measurement, ...]  # peers, and fastdist's other ways to reduce a list
    fits_caches: bool = False  # all ranks' buffers; the memory's speed is then no floor

    @property
    def measurements(self) -> tuple[Measurement, ...]:
        """The figures of fastdist, then of the others."""
        return (self.ours, *self.others)

    @property
    def has_floor(self) -> bool:
        """True if the floor is known and applies."""
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

    def times_as_fast(self, other: Measurement) -> float | None:
        """Return another engine's time divided by fastdist's; None without figures."""
        return other.p50_us / self.ours.p50_us if other.p50_us else None

    def host_times_as_fast(self, other: Measurement) -> float | None:
        """Return the same ratio of the host's times; None on CPUs."""
        if other.host_us is None or not self.ours.host_us:
            return None
        return other.host_us / self.ours.host_us


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
    busy_cores: float = 0.0  # that other programs kept busy before the run

    @property
    def machine_text(self) -> str:
        """The processor, the memory and the versions, in a line."""
        facts = self.machine
        return (
            f"{facts['processor']}, {facts['cores']} cores, {facts['cache']} cache, "
            f"{facts['memory']}; Linux {facts['kernel']}, Python {facts['python']}"
        )

    @property
    def busy_warnings(self) -> list[str]:
        """A warning if other programs kept cores busy before the run that the ranks need."""
        cores = usable_cores()
        if self.busy_cores <= max(0, cores - self.ranks) + _MOST_BUSY_CORES:
            return []
        return [
            f"busy machine: other programs kept {self.busy_cores:.1f} of {cores} cores busy before "
            f"the run, which {self.ranks} ranks need"
        ]

    @property
    def call_warnings(self) -> list[str]:
        """Warnings if the machine was busy during the run, or timed calls were few."""
        wide = [row for row in self.rows if row.ours.p99_us > _WIDE_SPREAD * row.ours.p50_us]
        few = [row for row in self.rows if row.ours.iterations < _FEW_CALLS]
        warnings = []
        if wide:
            warnings.append(
                f"busy machine: p99 is more than {_WIDE_SPREAD:g} times p50 at "
                f"{self._titles(wide)}; {self._why_wide}"
            )
        if few:
            warnings.append(
                f"too few calls: fewer than {_FEW_CALLS} at {self._titles(few)}; --time-s or "
                "--iters gives more"
            )
        return warnings

    @property
    def _why_wide(self) -> str:
        if self.ranks > (cores := usable_cores()):
            return f"{self.ranks} ranks take turns on {cores} cores"
        return "something else, such as another program, took a core during calls"

    def _titles(self, rows: Sequence[Row]) -> str:
        if len(rows) == len(self.rows) > 1:
            return "all of them"
        return ", ".join(dict.fromkeys(row.case.title for row in rows))

    @property
    def wrong(self) -> int:
        """Number of fastdist's wrong elements over all rows."""
        return sum(row.ours.wrong or 0 for row in self.rows)


def slowest_rank(times_ns: Sequence[Sequence[int]]) -> list[int]:
    """Return the longest of the ranks' times for each iteration."""
    return [max(ranks) for ranks in zip(*times_ns, strict=True)]


def p99_ns(times_ns: Sequence[int]) -> int:
    """Return the 99th percentile."""
    ordered = sorted(times_ns)
    return ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]


def combined(rows: Sequence[Row]) -> Row:
    """Combine the rows of one case from several passes: medians, and the sums of counts.

    Engines that the last row lacks are left out.
    """

    def combine(name: str) -> Measurement:
        passes = [way for row in rows for way in row.measurements if way.engine == name]
        if unsupported := next((way for way in passes if way.unsupported), None):
            return unsupported
        samples_us = tuple(way.p50_us for way in passes)
        checked = [way.wrong for way in passes if way.wrong is not None]
        return Measurement(
            engine=name,
            p50_us=statistics.median(samples_us),
            p99_us=statistics.median(way.p99_us for way in passes),
            iterations=sum(way.iterations for way in passes),
            wrong=sum(checked) if checked else None,
            samples_us=samples_us,
        )

    ours, *others = (combine(way.engine) for way in rows[-1].measurements)
    floor_us = statistics.median(row.floor_us for row in rows)
    return replace(rows[-1], floor_us=floor_us, ours=ours, others=tuple(others))


def median_us(times_ns: Sequence[int]) -> float | None:
    """Return the median in microseconds; None without times."""
    return statistics.median(times_ns) / 1e3 if times_ns else None


def link_us(case: Case, world_size: int, link_gb_per_s: float) -> float:
    """Return the time of a case in µs if its bus bandwidth is that of a GPU's links.

    0 if the speed of the links is unknown.
    """
    factor = COLLECTIVES[case.collective].bus_factor(world_size)
    return factor * case.bytes / link_gb_per_s / 1e3 if link_gb_per_s else 0.0


def floor_us(case: Case, world_size: int, copy_gb_per_s: float) -> float:
    """Return the time in µs of a case's minimum memory traffic at the copy bandwidth."""
    buffers = COLLECTIVES[case.collective].floor_buffers(world_size)
    return buffers * case.bytes / copy_gb_per_s / 1e3


def buffer_bytes(case: Case, world_size: int) -> int:
    """Return the total size of all ranks' buffers."""
    if case.model:
        return world_size * case.bytes
    ranks = range(world_size)
    elements = (buffer_elements(case.collective, case.count, rank, world_size) for rank in ranks)
    return sum(map(sum, elements)) * DTYPE_BYTES[case.dtype]
