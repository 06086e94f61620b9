"""Metrics of torchmetrics where they are found; what they count is in strategy_metrics.py."""

from __future__ import annotations

import subprocess
import sys

import fastdist as fd
import pytest
import torchmetrics

IMPORTED_LATE = """
import sys, torch, fastdist as fd
strategy = fd.MirroredStrategy(["cpu:0", "cpu:1"])
before = torch.nn.Module.__init__
with strategy.scope():
    assert "torchmetrics" not in sys.modules
    import torchmetrics
    first = torchmetrics.SumMetric()
    second = first.clone()
assert torch.nn.Module.__init__ is before
assert torchmetrics.Metric.__setstate__.__qualname__ == "Metric.__setstate__"
assert "__setstate__" not in vars(torchmetrics.MetricCollection)
strategy.run(lambda: (first.update(1.0), second.update(2.0)))
assert first.compute() == 2 and second.compute() == 4
"""


@pytest.mark.slow
def test_torchmetrics_is_imported_in_the_scope() -> None:
    subprocess.run([sys.executable, "-c", IMPORTED_LATE], check=True, timeout=60)


def test_a_single_replica_leaves_metrics_as_they_are() -> None:
    with fd.OneDeviceStrategy("cpu").scope():
        metric = torchmetrics.SumMetric()
    assert type(metric) is torchmetrics.SumMetric
