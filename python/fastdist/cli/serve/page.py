"""The page that `fastdist serve` shows on a terminal."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from fastdist.cli.doctor.facts import format_bytes
from fastdist.cli.serve.reading import Reading

if TYPE_CHECKING:
    from rich.console import RenderableType

_BAR_WIDTH = 30
_KINDS = {"DenseSpec": "variable", "RowsSpec": "table"}


@contextmanager
def shown_page(about: Mapping[str, str]) -> Iterator[Callable[[Reading], None]]:
    """Yields what draws the page anew for a reading; its last state stays on the terminal.

    Args:
        about: where the server is; above all else.

    Raises:
        ImportError: rich is not installed.
    """
    try:
        from rich.live import Live
    except ImportError:
        raise ImportError("the page on the terminal needs rich: pip install rich") from None
    with Live(auto_refresh=False) as live:
        yield lambda reading: live.update(draw(reading, about), refresh=True)


def draw(reading: Reading, about: Mapping[str, str]) -> RenderableType:
    """The page: where it is, totals, staleness, and the objects, the largest first."""
    from rich.console import Group
    from rich.text import Text

    stats = reading.stats
    lines = [f"{what}: {where}" for what, where in about.items()]
    totals = (
        f"up {datetime.timedelta(seconds=int(stats['uptime_s']))}   "
        f"{reading.requests_per_s:,.1f} requests/s   {stats['requests']:,} requests, "
        f"{stats['repeated']:,} repeated, {stats['malformed']:,} malformed"
    )
    parts: list[RenderableType] = [Text("\n".join([*lines, totals, ""]))]
    if reading.staleness:
        parts.append(_staleness(reading))
    return Group(*parts, _objects(reading))


def _staleness(reading: Reading) -> RenderableType:
    from rich.bar import Bar
    from rich.table import Table

    table = Table(title="staleness", title_justify="left", box=None, pad_edge=False)
    table.add_column("steps", justify="right")
    table.add_column("pushes", justify="right")
    table.add_column("", width=_BAR_WIDTH)
    most = max(reading.staleness.values())
    for steps, count in reading.staleness.items():
        table.add_row(steps, f"{count:,}", Bar(most, 0, count, width=_BAR_WIDTH))
    return table


def _objects(reading: Reading) -> RenderableType:
    from rich.table import Table
    from rich.text import Text

    table = Table(show_footer=True, title="variables and tables", title_justify="left")
    objects = reading.stats["objects"]
    table.add_column("name", footer=f"{len(objects)} in all", overflow="fold")
    table.add_column("kind")
    for name, total in (
        ("rows", f"{reading.rows:,}"),
        ("memory", format_bytes(reading.nbytes)),
        ("steps", f"{reading.steps:,}"),
        ("steps/s", f"{sum(reading.steps_per_s.values()):,.1f}"),
    ):
        table.add_column(name, footer=total, justify="right", no_wrap=True)
    for entry in sorted(objects, key=lambda entry: -entry["nbytes"]):
        table.add_row(
            Text(entry["name"]),
            _KINDS.get(entry["kind"], entry["kind"]),
            f"{entry['rows']:,}" if "rows" in entry else "",
            format_bytes(entry["nbytes"]),
            f"{entry['steps']:,}",
            f"{reading.steps_per_s[entry['name']]:,.1f}",
        )
    return table
