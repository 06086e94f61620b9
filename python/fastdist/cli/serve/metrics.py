"""A server's contents and activity as metrics for Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

Stats = Callable[[], Mapping[str, Any]]
_PREFIX = "fastdist_ps"
_COUNTS = {
    "requests": "Requests received.",
    "repeated": "Repeated changes, which were not applied again.",
    "malformed": "Messages that do not follow the protocol.",
}
_OBJECT_COUNTS = {"steps": "Pushes applied."}
_OBJECT_SIZES = {"nbytes": ("bytes", "Memory."), "rows": ("rows", "Rows of a table.")}
_STALENESS_BITS = 17


@contextmanager
def served_metrics(stats: Stats, host: str, port: int) -> Iterator[str]:
    """Answer Prometheus over HTTP while the context is open; yield the URL.

    Args:
        stats: returns the result of `Server.stats`; called in another thread for every scrape.
        host: IP address to listen on.
        port: port to listen on; 0 chooses a free one.

    Raises:
        ImportError: prometheus_client is not installed.
        OSError: the address cannot be bound.
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
    """Yield the metrics of a server's statistics."""
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    for key, text in _COUNTS.items():
        yield CounterMetricFamily(f"{_PREFIX}_{key}", text, stats[key])
    yield GaugeMetricFamily(f"{_PREFIX}_uptime_seconds", "Time since the start.", stats["uptime_s"])
    rounds = stats["rounds"]
    yield GaugeMetricFamily(f"{_PREFIX}_open_rounds", "Rounds not yet applied.", rounds["open"])
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
    """Convert ranges that double, such as "4-7", to Prometheus' cumulative buckets."""
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
        "Pushes by the number of other pushes since the pull.",
        buckets,
        sum_value=None,
    )
