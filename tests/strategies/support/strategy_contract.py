"""Tests of contexts and values, for every strategy.

A test hands a function to `strategies.run`, which calls it with a strategy once in every process.
"""

from __future__ import annotations

import time
from typing import Any

import fastdist as fd
import pytest
import torch
from digits_training import batch, replica_id
from fastdist import Strategy
from fastdist.errors import PeerFailureError
from replica_tests import on_replicas
from torch import nn


class StrategyContract:
    """Contexts and values. Subclasses choose the strategy."""

    copies_parameters = True

    @on_replicas
    def test_reduce_of_one_on_each(self, strategy: Strategy) -> None:
        n = strategy.num_replicas_in_sync
        value = strategy.run(lambda: torch.tensor(1.0))
        for _ in range(2):
            assert strategy.reduce("sum", value) == n
            assert strategy.reduce("mean", value) == 1
        with strategy.scope():
            assert strategy.reduce("sum", value) == n
            assert strategy.reduce("mean", value) == 1
            assert strategy.reduce("max", strategy.run(replica_id)) == n - 1
            assert strategy.reduce("mean", strategy.run(replica_id)) == (n - 1) / 2

    @on_replicas
    def test_reduce_along_an_axis(self, strategy: Strategy) -> None:
        n = strategy.num_replicas_in_sync
        value = strategy.run(lambda: torch.tensor([1.0, 2.0]))
        assert strategy.reduce("mean", value, axis=0) == 1.5
        assert strategy.reduce("sum", value, axis=0) == 3 * n
        ragged = strategy.run(lambda: torch.arange(replica_id() + 1.0))
        rows = [float(x) for r in range(n) for x in range(r + 1)]
        expected = pytest.approx(sum(rows) / len(rows))
        assert float(strategy.reduce("mean", ragged, axis=0)) == expected

    @on_replicas
    def test_structures(self, strategy: Strategy) -> None:
        result = strategy.run(lambda: {"a": torch.ones(2), "b": (replica_id(), [1.0])})
        total = strategy.reduce("sum", result)
        n = strategy.num_replicas_in_sync
        assert total["a"].tolist() == [n, n]
        assert total["b"][0] == n * (n - 1) // 2
        assert total["b"][1] == [n]

    @on_replicas
    def test_all_reduce_and_its_gradient(self, strategy: Strategy) -> None:
        n = strategy.num_replicas_in_sync

        def step() -> torch.Tensor:
            context = fd.get_replica_context()
            assert context is not None
            x = torch.tensor([1.0, 2.0], requires_grad=True)
            total = context.all_reduce("sum", x)
            assert total.tolist() == [n, 2 * n]
            total.backward(torch.tensor([1.0, replica_id()]))
            assert x.grad is not None
            assert x.grad.tolist() == [n, n * (n - 1) / 2]
            mean = context.all_reduce("mean", {"r": replica_id()})
            assert mean["r"] == (n - 1) / 2
            return total

        strategy.run(step)

    @on_replicas
    def test_all_gather_and_its_gradient(self, strategy: Strategy) -> None:
        n = strategy.num_replicas_in_sync

        def step() -> None:
            context = fd.get_replica_context()
            assert context is not None
            own = replica_id()
            x = torch.full((2, own + 1), float(own), requires_grad=True)
            joined = context.all_gather(x, axis=1)
            assert joined[0].tolist() == [float(r) for r in range(n) for _ in range(r + 1)]
            weights = torch.arange(joined.numel(), dtype=torch.float32).reshape(joined.shape)
            joined.backward(weights)
            begin = own * (own + 1) // 2
            assert x.grad is not None
            assert x.grad.tolist() == (n * weights[:, begin : begin + own + 1]).tolist()

        strategy.run(step)

    @on_replicas
    def test_gather(self, strategy: Strategy) -> None:
        n = strategy.num_replicas_in_sync
        value = strategy.run(lambda: torch.full((replica_id() + 1, 1), float(replica_id())))
        rows = strategy.gather(value, axis=0)
        assert rows.flatten().tolist() == [float(r) for r in range(n) for _ in range(r + 1)]
        with pytest.raises(ValueError, match="at least one dimension"):
            strategy.gather(strategy.run(lambda: torch.tensor(1.0)), axis=0)
        if n > 1:
            ragged = strategy.run(lambda: torch.ones(2, replica_id() + 1))
            with pytest.raises(ValueError, match=r"\(2, 1\)"):
                strategy.gather(ragged, axis=0)

    @on_replicas
    def test_reduce_to_a_device(self, strategy: Strategy) -> None:
        n = strategy.num_replicas_in_sync
        one = strategy.run(lambda: torch.tensor(1.0))
        assert strategy.reduce_to("sum", one, "cpu") == n
        with strategy.scope():
            variable = fd.Variable(0.0)
        assert strategy.reduce_to("sum", one, variable) == n
        pairs = [(one, "cpu"), (strategy.run(lambda: torch.ones(2)), torch.zeros(1))]
        scalar, vector = strategy.batch_reduce_to("sum", pairs)
        assert scalar == n
        assert vector.tolist() == [n, n]

    def test_update_each_component(self, strategies: Any) -> None:
        copies_parameters = self.copies_parameters

        def case(strategy: Strategy) -> None:
            with strategy.scope():
                model = nn.Linear(2, 1)
            amount = strategy.distribute_values_from_function(lambda context: 3.0)

            def put(component: torch.Tensor, value: float) -> int:
                component.fill_(value)
                return id(component)

            ids = strategy.update(model.weight, put, args=(amount,))
            own = strategy.local_results(ids)
            assert own == (id(model.weight),) or not copies_parameters
            strategy.check_in_sync()
            for total in strategy.local_results(strategy.run(lambda: model.weight.sum().item())):
                assert total == 6.0

        strategies.run(case)

    @on_replicas
    def test_contexts(self, strategy: Strategy) -> None:
        assert not fd.has_strategy()
        assert fd.get_strategy() is not None
        assert fd.get_replica_context() is not None
        assert not fd.in_cross_replica_context()
        with strategy.scope(), strategy.scope():
            assert fd.get_strategy() is strategy
            assert fd.has_strategy()
            assert fd.in_cross_replica_context()
            assert fd.get_replica_context() is None

            def inside() -> None:
                assert fd.get_strategy() is strategy
                assert not fd.in_cross_replica_context()

            strategy.run(inside)
            with pytest.raises(RuntimeError, match="Mixing"), fd.DefaultStrategy().scope():
                pass
            with pytest.raises(RuntimeError, match="Mixing"):
                fd.DefaultStrategy().run(inside)
            assert fd.get_strategy() is strategy
        ids = strategy.run(replica_id)
        assert strategy.local_results(ids) == strategy.local_replica_ids

    @on_replicas
    def test_run_is_strict(self, strategy: Strategy) -> None:
        with pytest.raises(ValueError, match="tuple or list, got Tensor"):
            strategy.run(lambda x: x, args=torch.ones(1))
        with pytest.raises(RuntimeError, match="inside run"):
            strategy.run(lambda: strategy.run(lambda: None))
        with pytest.raises(RuntimeError, match="inside run"):
            strategy.run(lambda: strategy.scope().__enter__())
        with pytest.raises(ValueError, match=r'sum, mean, min or max, got .*; use op="mean"'):
            strategy.reduce("average", 1.0)
        with pytest.raises(ValueError, match=r'got <RedOpType\.SUM.* use op="sum"'):
            strategy.reduce(torch.distributed.ReduceOp.SUM, 1.0)
        (x,) = batch(strategy, torch.ones(8))
        with pytest.raises(ValueError, match=r"got PerReplica; write args=\(batch,\)"):
            strategy.run(lambda x: x, args=x)
        with pytest.raises(TypeError, match=r"2 were given; to pass a batch, write args="):
            strategy.run(lambda pair: pair, args=(x, x))
        with pytest.raises(TypeError, match=r"missing 1 required positional argument: 'b'$"):
            strategy.run(lambda a, b: a, args=(x,))
        for name, ours in (
            ("experimental_run_v2", "run"),
            ("experimental_distribute_dataset", "distribute_dataset"),
            ("world_size", "num_replicas_in_sync"),
            ("size", "num_replicas_in_sync"),
            ("rank", r"local_replica_ids\[0\]"),
        ):
            with pytest.raises(AttributeError, match=f"'{name}'; use {ours}$"):
                getattr(strategy, name)
        assert strategy.is_chief == (0 in strategy.local_replica_ids)
        assert strategy.reduce("sum", strategy.run(lambda: 1.0)) == (strategy.num_replicas_in_sync)

    @on_replicas
    def test_an_exception_in_one_replica(self, strategy: Strategy) -> None:
        last = strategy.num_replicas_in_sync - 1

        def failing(waits: bool) -> None:
            if replica_id() == last:
                raise KeyError("lost")
            if waits:
                fd.get_replica_context().all_reduce("sum", torch.ones(1))

        def run(waits: bool) -> None:
            strategy.run(failing, (waits,))
            strategy.reduce("sum", 1.0)  # those who did not wait learn of it here

        for waits in (True, False, True):
            begin = time.monotonic()
            if last in strategy.local_replica_ids:
                with pytest.raises(KeyError, match="lost") as caught:
                    run(waits)
                assert any(entry.name == "failing" for entry in caught.traceback)
            else:
                with pytest.raises(PeerFailureError, match=f"rank {last} has") as failure:
                    run(waits)
                assert failure.value.ranks == (last,)
            assert time.monotonic() - begin < 15
            assert strategy.reduce("sum", strategy.run(lambda: 1.0)) == last + 1

    @on_replicas
    def test_merge_call(self, strategy: Strategy) -> None:
        calls = []

        def merged(given: Strategy, value: Any, scale: float) -> Any:
            assert fd.in_cross_replica_context()
            assert given is strategy
            calls.append(1)
            return given.reduce("sum", value) * scale

        def step() -> torch.Tensor:
            context = fd.get_replica_context()
            assert context is not None
            result: torch.Tensor = context.merge_call(
                merged, args=(torch.tensor(float(replica_id())),), kwargs={"scale": 2.0}
            )
            assert fd.get_replica_context() is context
            return result

        n = strategy.num_replicas_in_sync
        for result in strategy.local_results(strategy.run(step)):
            assert result == n * (n - 1)
        assert len(calls) == 1

        def run_again(given: Strategy) -> None:
            given.run(lambda: None)

        if n > 1:
            with pytest.raises(RuntimeError, match="run was called while the strategy is running"):
                strategy.run(lambda: fd.get_replica_context().merge_call(run_again))

    @on_replicas
    def test_distribute_values_from_function(self, strategy: Strategy) -> None:
        value = strategy.distribute_values_from_function(
            lambda context: 10 * context.replica_id_in_sync_group
        )
        doubled = strategy.run(lambda x: 2 * x, args=(value,))
        expected = tuple(20 * i for i in strategy.local_replica_ids)
        assert strategy.local_results(doubled) == expected
