"""Sums up a report: how fast fastdist is next to each engine, and one sentence per peer."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from fastdist.cli.bench.intervals import Interval, median_interval
from fastdist.cli.bench.peers import peer_of
from fastdist.cli.bench.results import Measurement, Report, Row


def ratio_of(row: Row, other: Measurement) -> Interval:
    """Return another engine's time divided by fastdist's, from the ratio of each pass."""
    pairs = zip(other.samples_us, row.ours.samples_us, strict=True)
    return median_interval([theirs / ours for theirs, ours in pairs])


def peer_sentences(report: Report) -> Iterator[str]:
    """Yield a sentence per peer, with the fastest of its engines and ways in each case."""
    versions: dict[str, str] = {}
    for name, version in report.engines.items():
        versions.setdefault(peer_of(name), version)
    del versions["fastdist"]
    for peer, version in versions.items():
        ratios: dict[str, Interval] = {}
        for row in report.rows:
            ways = [m for m in row.others if peer_of(m.engine) == peer and not m.unsupported]
            if ways:
                best = min(ways, key=lambda way: way.p50_us)
                ratios[row.case.title] = ratio_of(row, best)
        yield f"{version} {_compared(ratios) if ratios else 'supports none of the cases.'}"


def _compared(ratios: dict[str, Interval]) -> str:
    estimates = {title: ratio.estimate for title, ratio in ratios.items()}
    least, most = (f(estimates, key=lambda title: estimates[title]) for f in (min, max))
    slower = [title for title, ratio in ratios.items() if ratio.high < 1]
    faster = sum(ratio.low > 1 for ratio in ratios.values())
    named = f" ({', '.join(slower)})" if slower else ""
    undecided = len(ratios) - faster - len(slower)
    return (
        f"takes {digits(statistics.median(estimates.values()))} times as long as fastdist in the "
        f"median of {len(ratios)} cases, from {digits(estimates[least])} ({least}) to "
        f"{digits(estimates[most])} ({most}); fastdist is faster in {faster}, slower in "
        f"{len(slower) or 'none'}{named}"
        + (f", and the intervals of {undecided} leave it open." if undecided else ".")
    )


def unstable_titles(report: Report) -> list[str]:
    """Return the cases where fastdist's time is unstable."""
    return [
        row.case.title for row in report.rows if median_interval(row.ours.samples_us).is_unstable
    ]


def digits(ratio: float) -> str:
    """Format a ratio with two digits or more."""
    return f"{ratio:.2f}" if ratio < 0.995 else f"{ratio:.1f}" if ratio < 9.95 else f"{ratio:.0f}"


def format_time(us: float) -> str:
    """Format microseconds in the unit that suits: `12.3 µs`."""
    for limit, unit in ((1e6, "s"), (1e3, "ms"), (1, "µs")):
        if us >= limit:
            return f"{us / limit:.3g} {unit}"
    return f"{us * 1e3:.3g} ns"
