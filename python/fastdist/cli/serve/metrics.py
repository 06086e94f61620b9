"""What a server keeps and does, as Prometheus reads it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

Stats = Callable[[], Mapping[str, Any]]
_PREFIX = "fastdist_ps"
_COUNTS = {
    "requests": "Requests that have come.",
    "repeated": "Changes that came again and were not applied again.",
    "malformed": "Messages that were none of this protocol.",
}
_OBJECT_COUNTS = {"steps": "Pushes that were applied."}
_OBJECT_SIZES = {"nbytes": ("bytes", "Memory."), "rows": ("rows", "Rows of a table.")}
_STALENESS_BITS = 17


@contextmanager
def served_metrics(stats: Stats, host: str, port: int) -> Iterator[str]:
    """Answers Prometheus over HTTP while the context is open; yields the URL.

    Args:
        stats: gives what `Server.stats` gives; called in another thread for every scrape.
        host: IP address to listen at.
        port: there; 0: a free one.

    Raises:
        ImportError: prometheus_client is not installed.
        OSError: the address cannot be listened at.
    """
    try:
        from prometheus_client import CollectorRegistry, ProcessCollector, start_http_server
    except ImportError:
        raise ImportError("metrics need prometheus_client: pip install prometheus-client") from None
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    registry.register(_Collector(stats))
    httpd, thread = start_http_server(port, host, registry)
    shown = f"[{host}]" if ":" in host else host
    try:
        yield f"http://{shown}:{httpd.server_port}/metrics"
    finally:
        httpd.shutdown()
        httpd.server_close()
        thread.join()


class _Collector:
    def __init__(self, stats: Stats) -> None:
        self._stats = stats

    def collect(self) -> Iterable[Metric]:
        return metrics_of(self._stats())


def metrics_of(stats: Mapping[str, Any]) -> Iterator[Metric]:
    """The metrics of a server's statistics."""
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    for key, text in _COUNTS.items():
        yield CounterMetricFamily(f"{_PREFIX}_{key}", text, stats[key])
    yield GaugeMetricFamily(f"{_PREFIX}_uptime_seconds", "Since it began.", stats["uptime_s"])
    rounds = stats["rounds"]
    yield GaugeMetricFamily(f"{_PREFIX}_open_rounds", "Rounds to be applied yet.", rounds["open"])
    yield GaugeMetricFamily(
        f"{_PREFIX}_open_rounds_bytes", "Memory of their gradients.", rounds["nbytes"]
    )
    labels = ("name", "kind")
    for key, text in _OBJECT_COUNTS.items():
        counts = CounterMetricFamily(f"{_PREFIX}_object_{key}", text, labels=labels)
        for entry in stats["objects"]:
            counts.add_metric([entry["name"], entry["kind"]], entry[key])
        yield counts
    for key, (name, text) in _OBJECT_SIZES.items():
        sizes = GaugeMetricFamily(f"{_PREFIX}_object_{name}", text, labels=labels)
        for entry in stats["objects"]:
            if key in entry:
                sizes.add_metric([entry["name"], entry["kind"]], entry[key])
        yield sizes
    yield _staleness(stats["staleness"])


def _staleness(histogram: Mapping[str, int]) -> Metric:
    """Ranges that double, such as "4-7", as buckets that Prometheus adds up from below."""
    from prometheus_client.core import HistogramMetricFamily

    last_of = {int(steps.rpartition("-")[2]): count for steps, count in histogram.items()}
    buckets = []
    for bits in range(_STALENESS_BITS):
        bound = (1 << bits) - 1
        below = sum(count for last, count in last_of.items() if last <= bound)
        buckets.append((str(float(bound)), below))
    buckets.append(("+Inf", sum(last_of.values())))
    return HistogramMetricFamily(
        f"{_PREFIX}_staleness_steps",
        "Pushes by how many others came between the pull and them.",
        buckets,
        sum_value=None,
    )
