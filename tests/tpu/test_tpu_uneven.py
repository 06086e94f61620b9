"""TPUStrategy: losses, statistics and metrics of uneven batches exclude padding."""

from __future__ import annotations

import warnings
from typing import Any

import fastdist as fd
import pytest
import torch
import torch.nn.functional as F
from digits_training import require_close
from fastdist import TPUStrategy
from fastdist.errors import UnsupportedError
from torch import nn
from virtual_devices import N, mirrored, on_devices

pytestmark = on_devices


def test_joining_uneven_batches_otherwise_is_refused(strategy: TPUStrategy) -> None:
    def norm(x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.vector_norm(x)

    even, uneven = strategy.distribute_dataset(torch.arange(2.0 * N + 1), global_batch_size=2 * N)
    strategy.run(norm, (even,))
    with pytest.raises(UnsupportedError, match="linalg_vector_norm joins the examples of an unev"):
        strategy.run(norm, (uneven,))
    with pytest.warns(UserWarning, match=r"len\(\) of an uneven batch"):
        strategy.run(lambda x: len(x), (uneven,))


LOSSES: list[Any] = [
    lambda s, y: F.cross_entropy(s, y, weight=torch.arange(1.0, 4.0).to(s.device)),
    lambda s, y: F.cross_entropy(s, y, label_smoothing=0.1),
    lambda s, y: F.nll_loss(F.log_softmax(s, 1), y),
    lambda s, y: F.mse_loss(s, F.one_hot(y, 3).float()),
    lambda s, y: F.binary_cross_entropy_with_logits(s, F.one_hot(y, 3).float()),
    lambda s, y: F.poisson_nll_loss(s, F.one_hot(y, 3).float()),
    lambda s, y: (
        fd.nn.compute_average_loss(F.cross_entropy(s, y, reduction="none")) * 0
        + F.smooth_l1_loss(s.reshape(-1), F.one_hot(y, 3).float().reshape(-1))
    ),
    lambda s, y: (s.t().unsqueeze(0).transpose(1, 2) ** 2).mean((0, 1)).sum(),
    lambda s, y: s.logsumexp(1).mean() + s.mean(0).square().sum() * 0,
]


def gradient(strategy: fd.Strategy, loss: Any) -> tuple[torch.Tensor, float]:
    torch.manual_seed(0)
    with strategy.scope():
        model = nn.Linear(4, 3)
    data = torch.randn(11, 4), torch.arange(11) % 3
    value = 0.0
    for one in strategy.distribute_dataset(data, global_batch_size=8):

        def step(batch: Any) -> torch.Tensor:
            model.zero_grad()
            result: torch.Tensor = loss(model(batch[0]), batch[1])
            result.backward()
            return result.detach()

        value = float(strategy.reduce("mean", strategy.run(step, (one,))))
    assert model.weight.grad is not None
    return model.weight.grad.cpu(), value


@pytest.fixture(scope="module")
def gradients_of_replicas() -> Any:
    """The gradient of every loss, by replicas that are processes."""
    return mirrored(lambda strategy: [gradient(strategy, loss) for loss in LOSSES])


@pytest.mark.parametrize("number", range(len(LOSSES)))
def test_losses_of_uneven_batches(
    strategy: TPUStrategy, gradients_of_replicas: Any, number: int
) -> None:
    """Losses weighted by each replica's examples agree with other replicas."""
    got, value = gradient(strategy, LOSSES[number])
    same, expected = gradients_of_replicas[number]
    torch.testing.assert_close(got, same, rtol=0, atol=1e-6)
    assert value == pytest.approx(expected, abs=1e-5)


def test_sync_batch_norm(strategy: TPUStrategy) -> None:
    """Statistics are those of the global batch, in which 7 or 6 of 10 rows are padding."""

    def trained(strategy: fd.Strategy, norm: type[nn.Module]) -> list[torch.Tensor]:
        torch.manual_seed(0)
        with strategy.scope():
            model = nn.Sequential(nn.Linear(4, 3), norm(3), nn.Linear(3, 1))  # type: ignore[call-arg]
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: torch.Tensor) -> None:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()

        for one in strategy.distribute_dataset(torch.randn(24, 4), global_batch_size=10):
            strategy.run(step, (one,))
        strategy.check_in_sync()
        return [t.detach().cpu() for t in (*model.parameters(), *model.buffers())]

    one = fd.OneDeviceStrategy("cpu")
    require_close(trained(strategy, fd.nn.SyncBatchNorm), trained(one, nn.BatchNorm1d), 1e-5)


@pytest.mark.parametrize("steps", [1, 3])
def test_metrics_are_those_of_all_examples(steps: int) -> None:
    tm = pytest.importorskip("torchmetrics")
    classification = tm.classification

    def measured(strategy: fd.Strategy) -> dict[str, Any]:
        with strategy.scope():
            metrics = tm.MetricCollection(
                [
                    classification.MulticlassAUROC(5, thresholds=None),
                    classification.MulticlassPrecision(5),
                    classification.MulticlassRecall(5),
                ]
            )
            error = tm.MeanSquaredError()
            mean = tm.MeanMetric()
        generator = torch.Generator().manual_seed(0)
        data = torch.rand(43, 5, generator=generator), torch.arange(43) % 5

        def step(batch: Any) -> None:
            scores, labels = batch
            metrics.update(scores, labels)
            error.update(scores[:, 0], scores[:, 1])
            mean.update(scores[:, 0])
            if N > 1 and isinstance(strategy, TPUStrategy):
                with pytest.raises(UnsupportedError, match="a metric supports update only"):
                    mean.compute()

        found: dict[str, Any] = {}
        for _ in range(2):
            metrics.reset()
            for one in strategy.distribute_dataset(data, global_batch_size=10):
                strategy.run(step, (one,))
            found = {**metrics.compute(), "error": error.compute(), "mean": mean.compute()}
        return found

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Metric .* will save all targets", UserWarning)
        got = measured(TPUStrategy(steps_per_execution=steps))
        wanted = measured(fd.OneDeviceStrategy("cpu"))
    for name, value in wanted.items():
        torch.testing.assert_close(got[name].cpu(), value, rtol=1e-5, atol=1e-6)
