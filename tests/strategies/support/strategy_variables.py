"""Tests of variables, for every strategy."""

from __future__ import annotations

import copy
from typing import Any

import fastdist as fd
import pytest
import torch
from digits_training import replica_id
from fastdist import PerReplica, Strategy, VariableAggregation, VariableSynchronization
from replica_tests import on_replicas
from torch import nn, ones

ON_READ = VariableSynchronization.ON_READ
ON_WRITE = VariableSynchronization.ON_WRITE
NONE = VariableAggregation.NONE
SUM = VariableAggregation.SUM
MEAN = VariableAggregation.MEAN
FIRST = VariableAggregation.ONLY_FIRST_REPLICA


def made(strategy: Strategy, *args: Any, **kwargs: Any) -> fd.Variable:
    with strategy.scope():
        return fd.Variable(*args, **kwargs)


def in_replicas(strategy: Strategy, fn: Any) -> list[Any]:
    """Return the values of fn on the local replicas."""
    return [strategy.run(lambda: Box(fn())).content]


class Box:
    """No structure that `run` would take apart."""

    def __init__(self, content: Any) -> None:
        self.content = content


class Counter(nn.Module):
    """A model with state of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.seen = fd.Variable(0, synchronization=ON_READ, aggregation=SUM)
        self.loss = fd.Variable(0.0, synchronization=ON_READ, aggregation=MEAN)
        self.steps = fd.Variable(0, aggregation=FIRST)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.assign_add(len(x))
        return self.layer(x)


class VariableContract:
    @pytest.mark.parametrize("aggregation", list(VariableAggregation))
    @on_replicas
    def test_aggregated_on_write(
        self, strategy: Strategy, aggregation: VariableAggregation
    ) -> None:
        def check(strategy: Strategy, synchronization: VariableSynchronization) -> None:
            n, local = strategy.num_replicas_in_sync, len(strategy.devices)
            v = made(strategy, [1.0, 1.0], synchronization=synchronization, aggregation=aggregation)

            def step() -> list[float]:
                v.assign(torch.ones(2) * 2)
                return v.value.tolist()

            expected = 2.0 * n if aggregation is SUM else 2.0
            assert in_replicas(strategy, step) == [[expected] * 2] * local
            assert v.value.tolist() == [expected] * 2

            def add() -> float:
                v.assign_add(1.0)
                v.assign_sub(3)
                return float(v.value[1])

            expected -= 2.0 * n if aggregation is SUM else 2.0
            assert in_replicas(strategy, add) == [expected] * local
            v.assign(7)
            assert in_replicas(strategy, lambda: float(v.value[0])) == [7] * local
            strategy.check_in_sync()

        for synchronization in (ON_WRITE, VariableSynchronization.AUTO):
            check(strategy, synchronization)

    @on_replicas
    def test_rows_are_changed_by_all_replicas(self, strategy: Strategy) -> None:
        """Each replica gives two rows: its own number, and row 0."""
        n = strategy.num_replicas_in_sync

        def changed(change: str, aggregation: Any, updates: Any = 2.0) -> list[float]:
            v = made(strategy, torch.full((n, 2), 8.0), aggregation=aggregation)
            rows = lambda: [replica_id(), 0]  # noqa: E731
            strategy.run(lambda: getattr(v, change)(rows(), updates))
            if aggregation is not NONE:
                strategy.check_in_sync()
            assert torch.equal(v.value[:, 0], v.value[:, 1])
            return v.value[:, 0].tolist()

        assert changed("scatter_add", SUM) == [8.0 + 2 * (n + 1), *[10.0] * (n - 1)]
        assert changed("scatter_add", SUM, ones(2, 2)) == [8.0 + n + 1, *[9.0] * (n - 1)]
        assert changed("scatter_sub", MEAN) == [
            pytest.approx(8 - 2 * (n + 1) / n),
            *[pytest.approx(8 - 2 / n)] * (n - 1),
        ]
        assert changed("scatter_mul", SUM) == [8.0 * 2 ** (n + 1), *[16.0] * (n - 1)]
        assert changed("scatter_div", SUM) == [8.0 / 2 ** (n + 1), *[4.0] * (n - 1)]
        assert changed("scatter_min", SUM) == [2.0] * n
        assert changed("scatter_max", SUM) == [8.0] * n
        assert changed("scatter_max", SUM, torch.tensor([[9.0], [7.0]])) == [9.0] * n
        assert changed("scatter_update", SUM) == [2.0] * n
        assert changed("scatter_add", FIRST) == [12.0, *[8.0] * (n - 1)]
        last = [torch.tensor([3.0]), torch.tensor([4.0])]
        assert changed("scatter_update", FIRST, torch.stack(last)) == [4.0, *[8.0] * (n - 1)]
        if n > 1:
            with pytest.raises(ValueError, match=r"scatter_mul is not defined for .*MEAN"):
                changed("scatter_mul", MEAN)

    @on_replicas
    def test_rows_that_differ_in_number_and_rows_of_its_own(self, strategy: Strategy) -> None:
        n = strategy.num_replicas_in_sync
        v = made(strategy, torch.zeros(n, dtype=torch.int64), aggregation=SUM)
        strategy.run(lambda: v.scatter_add(range(replica_id()), torch.tensor(1)))
        assert v.value.tolist() == [n - 1 - i for i in range(n)]
        v.scatter_update([0, 0], torch.tensor([7, 5]))  # outside run: no aggregation
        v.scatter_max([], torch.empty(0, dtype=torch.int64))
        assert int(v.value[0]) == 5
        strategy.check_in_sync()
        own = made(strategy, torch.zeros(2))
        assert in_replicas(
            strategy, lambda: own.scatter_add([1], 1.0 + replica_id()) or own.value.tolist()
        ) == [[0.0, 1.0 + i] for i in strategy.local_replica_ids]

    @on_replicas
    def test_rows_that_cannot_be_changed(self, strategy: Strategy) -> None:
        v = made(strategy, torch.zeros(3, 2), aggregation=SUM)
        whole = made(strategy, torch.zeros(3, dtype=torch.int64), aggregation=SUM)
        wrong: list[tuple[type[Exception], str, Any]] = [
            (
                IndexError,
                "index 3 .* has 3 rows",
                lambda: v.scatter_add([3], 1),
            ),
            (IndexError, "index -1", lambda: v.scatter_update([0, -1], 1)),
            (TypeError, "must be integers", lambda: v.scatter_add([0.5], 1)),
            (TypeError, "scatter_div is not .*int64", lambda: whole.scatter_div([0], 2)),
            (TypeError, "int64 cannot hold torch.float", lambda: whole.scatter_add([0], 0.5)),
            (ValueError, r"indices must have shape \[n\]", lambda: v.scatter_add([[0]], 1)),
            (ValueError, r"shape \(1, 2\), got \(3,\)", lambda: v.scatter_add([0], ones(3))),
            (ValueError, "a scalar", lambda: made(strategy, 1.0).scatter_add([0], 1)),
            (
                ValueError,
                "scatter_min needs .* ON_WRITE",
                lambda: made(strategy, [1.0], synchronization=ON_READ).scatter_min([0], 1),
            ),
        ]
        for kind, message, call in wrong:
            with pytest.raises(kind, match=message):
                call()
        assert not v.value.any()

    @on_replicas
    def test_only_first_replica(self, strategy: Strategy) -> None:
        for initial in (5, 5.0, True):
            v = made(strategy, initial, aggregation=FIRST)
            in_replicas(strategy, lambda v=v: v.assign(replica_id()))
            assert not v.value.any()
            assert not any(in_replicas(strategy, lambda v=v: bool(v.value)))

    @on_replicas
    def test_each_keeps_its_own(self, strategy: Strategy) -> None:
        v = made(strategy, 0.0)
        in_replicas(strategy, lambda: v.assign(replica_id()))
        assert in_replicas(strategy, lambda: int(v.value)) == list(strategy.local_replica_ids)
        strategy.check_in_sync()  # of what is to be in sync

    @on_replicas
    def test_aggregated_on_read(self, strategy: Strategy) -> None:
        n = strategy.num_replicas_in_sync
        sums = made(strategy, 0, synchronization=ON_READ, aggregation=SUM)
        means = made(strategy, 0.0, synchronization=ON_READ, aggregation=MEAN)
        first = made(strategy, 9, synchronization=ON_READ, aggregation=FIRST)
        none = made(strategy, 9, synchronization=ON_READ)

        def step() -> list[int]:
            for v in (sums, means, first, none):
                v.assign(replica_id())
                if replica_id() == 0:  # alone: it does not communicate
                    v.assign_add(0)
            return [int(v.value) for v in (sums, means, first, none)]

        for replica, seen in zip(
            strategy.local_replica_ids, in_replicas(strategy, step), strict=True
        ):
            assert seen == [replica] * 4
        assert sums.value == n * (n - 1) / 2
        assert means.value == (n - 1) / 2
        assert first.value == 0
        if n > 1:
            with pytest.raises(ValueError, match="has no single value outside run"):
                _ = none.value
        locals_ = [int(value) for value in strategy.local_results(none)]
        assert locals_ == list(strategy.local_replica_ids)
        in_replicas(strategy, lambda: None)  # changes nothing
        assert sums.value == n * (n - 1) / 2
        assert int(strategy.reduce("sum", sums)) == n * (n - 1) / 2
        strategy.check_in_sync()

    @on_replicas
    def test_written_outside_run(self, strategy: Strategy) -> None:
        n = strategy.num_replicas_in_sync
        v = made(strategy, 7, synchronization=ON_READ, aggregation=SUM)
        assert v.value == 7
        v.assign(11)
        assert v.value == 11
        v.assign_add(3)
        assert v.value == 14
        in_replicas(strategy, lambda: v.assign_add(1))
        assert v.value == 14 + n
        mean = made(strategy, 3.0, synchronization=ON_READ, aggregation=MEAN)
        mean.assign_sub(1)
        assert in_replicas(strategy, lambda: float(mean.value)) == [2.0] * len(strategy.devices)
        assert mean.value == 2

    @on_replicas
    def test_a_run_that_fails_keeps_what_was_written(self, strategy: Strategy) -> None:
        n = strategy.num_replicas_in_sync
        v = made(strategy, 0, synchronization=ON_READ, aggregation=SUM)

        def step() -> None:
            v.assign_add(1)
            raise KeyError("nothing")

        with pytest.raises(KeyError):
            strategy.run(step)
        in_replicas(strategy, lambda: None)
        assert v.value == n

    @on_replicas
    def test_values_of_other_kinds(self, strategy: Strategy) -> None:
        v = made(strategy, 0, synchronization=ON_READ, aggregation=SUM)
        v.assign(2.5)
        assert v.value == 2
        with pytest.raises(TypeError, match=r"cannot add torch.float32 to .*int64"):
            v.assign_add(0.5)
        v.assign(made(strategy, 7))
        assert v.value == 7
        v.load_state_dict({"value": 3.0})
        assert v.value == 3
        own = made(strategy, 0.0)
        own.assign(PerReplica(strategy.local_replica_ids))
        assert in_replicas(strategy, lambda: int(own.value)) == list(strategy.local_replica_ids)

    @on_replicas
    def test_a_variable_outlives_its_strategy(self, strategy: Strategy) -> None:
        n = strategy.num_replicas_in_sync
        with strategy.scope():
            v = fd.Variable(0, synchronization=ON_READ, aggregation=SUM)
        strategy.run(lambda: v.assign_add(1))
        del strategy
        assert v.value == n

    @on_replicas
    def test_update(self, strategy: Strategy) -> None:
        v = made(strategy, 1.0)
        parts = PerReplica(tuple(float(i) for i in strategy.local_replica_ids))

        def fn(component: torch.Tensor, x: float) -> float:
            component.add_(x)
            return x

        got = strategy.update(v, fn, args=(parts,))
        assert strategy.local_results(got) == parts.values
        seen = in_replicas(strategy, lambda: float(v.value))
        assert seen == [1.0 + i for i in strategy.local_replica_ids]

    def test_part_of_a_model(self, strategies: Any) -> None:
        copies_parameters = self.copies_parameters

        def case(strategy: Strategy) -> None:
            n = strategy.num_replicas_in_sync
            torch.manual_seed(0)
            with strategy.scope():
                model = Counter()

            def step() -> dict[str, Any]:
                model(torch.ones(replica_id() + 1, 2)).sum().backward()
                model.loss.assign(float(replica_id()))
                model.steps.assign_add(1)
                return {k: v.clone() for k, v in model.state_dict().items()}

            inside = in_replicas(strategy, step)[0]
            saved = {k: v.clone() for k, v in model.state_dict().items()}
            assert set(saved) == {
                "layer.weight", "layer.bias", "seen.value", "loss.value", "steps.value",
            }  # fmt: skip
            for name, value in saved.items():
                torch.testing.assert_close(inside[name], value)
            assert saved["seen.value"] == n * (n + 1) // 2
            assert saved["loss.value"] == (n - 1) / 2
            assert saved["steps.value"] == 1

            plain = Counter()
            plain.load_state_dict(saved)
            assert plain.seen.value == saved["seen.value"]
            model.seen.assign(0)
            model.load_state_dict(plain.state_dict())
            torch.testing.assert_close(model.state_dict(), saved)

            def load() -> int:
                model.load_state_dict(saved)
                return int(model.seen.value)

            if copies_parameters:  # else what each replica does to them in run is refused
                parts = strategy.gather(strategy.run(lambda: torch.tensor([load()])))
                assert int(parts.sum()) == saved["seen.value"]
                assert int(parts.max() - parts.min()) <= 1
                torch.testing.assert_close(model.state_dict(), saved)

            model.double()  # new tensors: what replicas hold for themselves stays
            in_replicas(strategy, lambda: None)
            assert model.seen.value == saved["seen.value"]
            assert type(copy.deepcopy(model).seen) is fd.Variable
            with pytest.raises(RuntimeError, match=r"size mismatch for seen.value: \(2,\)"):
                model.load_state_dict({**saved, "seen.value": torch.zeros(2)})
            with pytest.raises(RuntimeError, match=r"Missing key.*seen\.value"):
                model.load_state_dict({k: v for k, v in saved.items() if k != "seen.value"})
            strategy.check_in_sync()

        strategies.run(case)

    @on_replicas
    def test_refused(self, strategy: Strategy) -> None:
        with pytest.raises(ValueError, match=r"torch.int64 cannot .*MEAN"):
            made(strategy, 1, aggregation=MEAN)
        for aggregation in (SUM, MEAN):
            with pytest.raises(ValueError, match="bool"):
                made(strategy, True, aggregation=aggregation)
        with pytest.raises(ValueError, match="'average' is not a valid"):
            made(strategy, 1.0, aggregation="average")
