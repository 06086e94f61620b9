"""Tests of modules' buffers, for every strategy.

A test hands a function to `strategies.run`, which calls it with a strategy once in every process.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import fastdist as fd
import pytest
import torch
from digits_training import replica_id, require_close
from fastdist import Strategy
from fastdist.errors import CollectiveMismatchError, PeerFailureError
from replica_tests import on_replicas
from torch import nn
from torch.nn.utils import parametrizations


class Averaged(nn.Module):
    """A running mean, linear in each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(2, dtype=torch.float64))
        self.layer = nn.Linear(2, 1).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean.mul_(0.75)
        if len(x):
            self.mean.add_(x.mean(0), alpha=0.25)
        out: torch.Tensor = self.layer(x)
        return out.sum() / max(len(out), 1)


class BuffersContract:
    """Buffers that forward writes. Subclasses choose the strategy."""

    @on_replicas
    def test_buffers_that_some_replicas_write(self, strategy: Strategy) -> None:
        """Experts: each is normalized by the replicas that used it, and all hold the same."""
        n = strategy.num_replicas_in_sync
        for width in (2, 3):
            with strategy.scope():
                model = nn.ModuleList(
                    nn.BatchNorm1d(2 if i == 0 else width, momentum=1.0) for i in range(n)
                )

            def step(model: Any = model) -> None:
                expert = model[replica_id()]
                x = torch.full((8, expert.num_features), 100.0 * replica_id())
                expert(x).square().mean().backward()

            strategy.run(step)
            strategy.check_in_sync()
            for i, expert in enumerate(model):
                assert expert.running_mean.tolist() == pytest.approx(
                    [100.0 * i] * expert.num_features
                )

    @on_replicas
    def test_buffers_that_are_written_without_backward(self, strategy: Strategy) -> None:
        def forward(strategy: Strategy, norm: nn.Module, values: torch.Tensor) -> list[Any]:
            return [
                strategy.run(lambda x: norm(x).sum(), (batch,))
                for batch in strategy.distribute_dataset(values, global_batch_size=16)
            ]

        n = strategy.num_replicas_in_sync
        with strategy.scope():
            norm = nn.BatchNorm1d(2, momentum=1.0)
        values = torch.arange(2.0 * (2 * n + 3)).reshape(-1, 2)  # divided unevenly
        results = forward(strategy, norm, values)
        strategy.check_in_sync()
        require_close([norm.running_mean], [values.mean(0)], 1e-6)
        assert norm.num_batches_tracked.item() == 1
        results = forward(strategy, norm, -values)
        strategy.reduce("sum", results[0])
        require_close([norm.running_mean], [-values.mean(0)], 1e-6)

        def skipping(x: torch.Tensor) -> None:
            loss = norm(x).square().mean()
            if replica_id():
                loss.backward()

        if n > 1:
            (batch,) = strategy.distribute_dataset(values, global_batch_size=16)
            with pytest.raises(CollectiveMismatchError, match="in skipping"):
                (strategy.run(skipping, (batch,)), strategy.reduce("sum", 1.0))

    @on_replicas
    def test_buffers_of_a_replica_without_examples(self, strategy: Strategy) -> None:
        def stepped(strategy: Strategy) -> list[torch.Tensor]:
            torch.manual_seed(0)
            with strategy.scope():
                norm = nn.BatchNorm1d(2)
                linear = parametrizations.spectral_norm(nn.Linear(2, 4))
            (batch,) = strategy.distribute_dataset(torch.tensor([[1.0, 2.0]]), global_batch_size=8)

            def step(x: torch.Tensor) -> None:
                wide = x[:, :, None].expand(-1, -1, 2)
                linear(norm(wide).sum(2)).mean().backward()

            strategy.run(step, (batch,))
            strategy.check_in_sync()
            buffers = [*norm.buffers(), *linear.buffers()]
            return [buffer.detach().clone().float() for buffer in buffers]

        require_close(stepped(strategy), stepped(fd.OneDeviceStrategy("cpu")), 1e-6)

    @pytest.mark.parametrize("size", [8, 9, 11])
    @on_replicas
    def test_several_batches_before_buffers_are_averaged(
        self, strategy: Strategy, size: int
    ) -> None:
        """The last batch is cut otherwise than the first two: 2 examples, 1 for one replica, …"""

        def mean(strategy: Strategy, ends_with_backward: bool) -> torch.Tensor:
            with strategy.scope():
                model = Averaged()
            data = torch.arange(2.0 * size, dtype=torch.float64).reshape(size, 2)
            batches = list(strategy.distribute_dataset(data, global_batch_size=4))

            def step(x: torch.Tensor, is_last: bool) -> None:
                with nullcontext() if is_last else strategy.no_sync():
                    model(x).backward()

            for batch in batches:
                if ends_with_backward:
                    strategy.run(step, (batch, batch is batches[-1]))
                else:
                    strategy.run(lambda x: model(x).detach(), (batch,))
            strategy.check_in_sync()
            return model.mean

        for ends_with_backward in (True, False):
            one = mean(fd.OneDeviceStrategy("cpu"), ends_with_backward)
            require_close([mean(strategy, ends_with_backward)], [one], 1e-12)

    @on_replicas
    def test_buffers_that_are_not_averaged_when_a_scope_opens_or_a_run_fails(
        self, strategy: Strategy
    ) -> None:
        n = strategy.num_replicas_in_sync
        for fails in (False, True):
            with strategy.scope():
                model = Averaged()
            data = torch.arange(4.0 * n + 2, dtype=torch.float64).reshape(2 * n + 1, 2)
            (batch,) = strategy.distribute_dataset(data, global_batch_size=2 * n + 1)
            strategy.run(lambda x, model=model: model(x).detach(), (batch,))
            if fails:
                with pytest.raises((ZeroDivisionError, PeerFailureError)):
                    strategy.run(lambda _: 1 / 0, (batch,))
            else:
                with strategy.scope():
                    nn.Linear(1, 1)
            strategy.check_in_sync()
            require_close([model.mean], [data.mean(0) / 4], 1e-12)
