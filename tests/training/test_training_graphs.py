"""Steps as CUDA graphs, with a stand-in for the graph: what it captured is called again.

tests/strategies/support/strategies_on_gpus.py has the real ones.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable
from typing import Any

import cloudpickle
import fastdist as fd
import pytest

torch = pytest.importorskip("torch")

from digits_training import digits, plain, require_close, sgd  # noqa: E402
from fastdist.training.graphed import GraphedStep  # noqa: E402
from ranks import ProcessRanks  # noqa: E402
from torch.nn import functional as F  # noqa: E402


class Captures:
    """Captures a step, and counts how often each is replayed."""

    def __init__(self) -> None:
        self.replays: list[int] = []

    def __call__(self, step: Callable[[], Any]) -> Callable[[], Any]:
        number = len(self.replays)
        self.replays.append(0)

        def replay() -> Any:
            self.replays[number] += 1
            return step()

        return replay


def test_trains_as_the_step_does() -> None:
    strategy = fd.OneDeviceStrategy("cpu")
    torch.manual_seed(1)
    with strategy.scope():
        model, optimizer = sgd()

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    captures = Captures()
    graphed = GraphedStep(step, captures)
    images, labels = digits()
    losses = [
        strategy.run(graphed, (images[i : i + 100], labels[i : i + 100]))
        for i in range(0, len(images), 100)
    ]
    # 1,797 digits: 17 batches of 100, three of which ran before the capture, and one of 97.
    assert captures.replays == [14]
    assert len({loss.data_ptr() for loss in losses}) == len(losses) == 18
    require_close(list(model.parameters()), plain(sgd), 1e-6)


def test_arguments_are_copied_into_the_graph() -> None:
    strategy = fd.OneDeviceStrategy("cpu")
    captures = Captures()
    graphed = GraphedStep(lambda batch, scale: batch["x"] * scale, captures)
    x = torch.zeros(3)
    for i in range(8):
        x.fill_(i)
        assert strategy.run(graphed, ({"x": x}, 2)).tolist() == [2.0 * i] * 3
    assert captures.replays == [5]
    assert strategy.run(graphed, ({"x": x}, 3)).tolist() == [21.0] * 3  # another kind


def test_uneven_batches_run_as_they_are() -> None:
    def case(comm: fd.Communicator) -> list[int]:
        strategy = fd.MirroredStrategy()
        captures = Captures()
        graphed = GraphedStep(lambda x: x.sum(), captures)
        data = strategy.distribute_dataset(torch.ones(50), global_batch_size=5)
        for batch in data:  # of 3 and 2
            assert strategy.reduce("sum", strategy.run(graphed, (batch,))) == 5
        return captures.replays

    ranks = ProcessRanks(2)
    try:
        assert ranks.run(call, cloudpickle.dumps(case)) == [[], []]
    finally:
        ranks.close()


def call(comm: fd.Communicator, case: bytes) -> Any:
    return pickle.loads(case)(comm)


def test_too_many_kinds_of_arguments_warn() -> None:
    strategy = fd.OneDeviceStrategy("cpu")
    captures = Captures()
    graphed = GraphedStep(lambda x: x, captures)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for size in range(10):
            for _ in range(5):
                strategy.run(graphed, (torch.zeros(size),))
    assert captures.replays == [2] * 8
    assert "more than 8 kinds of arguments" in str(caught[0].message)


def test_wrong_use_is_refused() -> None:
    strategy = fd.OneDeviceStrategy("cpu")
    graphed = GraphedStep(lambda x: x, Captures())
    with pytest.raises(RuntimeError, match=r"must be called by strategy\.run"):
        graphed(torch.zeros(1))
    with pytest.raises(TypeError, match=r"tensors or hashable.*got set"):
        strategy.run(graphed, ({1, 2},))


def test_on_cpus_a_step_stays_as_it_is() -> None:
    def step() -> int:
        return 7

    assert fd.OneDeviceStrategy("cpu").make_graphed(step) is step
