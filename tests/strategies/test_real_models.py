"""Real models train in float64 on several replicas as on one device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import fastdist as fd
import pytest
import torch
from digits_training import require_close
from fastdist import Strategy
from real_models import CLASSES, MODELS, RealModel
from test_strategies import ManyProcesses


def trained(strategy: Strategy, model: RealModel) -> list[torch.Tensor]:
    """The parameters and buffers after two epochs of three batches, two of them uneven."""
    torch.manual_seed(1)
    with strategy.scope():
        module = model.make()
        optimizer = model.optimizer(module.parameters())

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        def loss() -> torch.Tensor:
            optimizer.zero_grad()
            value: torch.Tensor = module(x, y)
            value.backward()
            return value

        if isinstance(optimizer, torch.optim.LBFGS):
            result = optimizer.step(loss)
        else:
            result = loss()
            optimizer.step()
        return torch.as_tensor(result).detach()

    generator = torch.Generator().manual_seed(2)
    count = 12 + 7
    x = torch.randn(count, *model.x, generator=generator)
    if model.is_text:
        x = torch.randint(20, (count, *model.x), generator=generator)
    y = torch.randint(CLASSES, (count,), generator=generator)
    losses = []
    for _ in range(2):
        for batch in strategy.distribute_dataset((x, y), global_batch_size=7):
            losses.append(strategy.reduce("mean", strategy.run(step, batch)))
    strategy.check_in_sync()
    assert torch.isfinite(torch.stack(losses)).all()
    return [*losses, *(value.detach().clone() for value in module.state_dict().values())]


def train_both(strategy: Strategy, name: str) -> None:
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        one = trained(fd.OneDeviceStrategy("cpu"), MODELS[name])
        require_close(trained(strategy, MODELS[name]), one, 1e-9)
    finally:
        torch.set_default_dtype(default)


@pytest.fixture(scope="module", params=[2, pytest.param(3, marks=pytest.mark.slow)])
def replicas(request: pytest.FixtureRequest) -> Iterator[ManyProcesses]:
    made = ManyProcesses(request.param)
    yield made
    made.close()


@pytest.mark.parametrize("name", list(MODELS))
def test_a_model_trains_as_on_one_device(replicas: ManyProcesses, name: str) -> None:
    def case(strategy: Strategy) -> Any:
        from test_real_models import train_both

        return train_both(strategy, name)

    replicas.run(case)


def test_enough_models_and_optimizers() -> None:
    optimizers = {model.optimizer.func for model in MODELS.values()}  # type: ignore[attr-defined]
    assert len(MODELS) >= 25
    assert len(optimizers) >= 12
