"""Strategies whose workers die, raise, or differ."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import cloudpickle
import fastdist as fd
import pytest
import torch
from fastdist import Strategy
from fastdist.errors import CollectiveMismatchError, FastdistError, PeerFailureError
from ranks import ProcessRanks, RankError
from test_strategies import run_case
from torch import nn


@pytest.fixture(params=["mirrored", "central"])
def run(request: pytest.FixtureRequest) -> Iterator[Callable[[Any], Any]]:
    ranks = ProcessRanks(3)

    def run(case: Callable[[Strategy], Any]) -> list[Any]:
        return ranks.run(run_case, cloudpickle.dumps(case), request.param, {"timeout_s": 20.0})

    yield run
    ranks.close()


def test_a_worker_that_is_killed_in_a_step(run: Callable[[Any], Any]) -> None:
    def case(strategy: Strategy) -> None:
        with strategy.scope():
            model = nn.Linear(4, 4)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        last = strategy.num_replicas_in_sync - 1

        def step(doomed: bool) -> None:
            if doomed and fd.get_replica_context().replica_id_in_sync_group == last:
                os.kill(os.getpid(), signal.SIGKILL)
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()

        strategy.run(step, (False,))
        begin = time.monotonic()
        with pytest.raises(PeerFailureError) as caught:
            strategy.run(step, (True,))
        assert time.monotonic() - begin < 15
        assert caught.value.ranks == (last,), str(caught.value)
        with pytest.raises(FastdistError):
            strategy.run(step, (False,))

    with pytest.raises(RankError) as caught:
        run(case)
    assert list(map(str, caught.value.errors.values())) == ["exited with -9"], caught.value


def test_a_worker_that_raises_in_a_step(run: Callable[[Any], Any]) -> None:
    """Its error ends the worker; waiting workers get an error that names it."""

    def case(strategy: Strategy) -> None:
        with strategy.scope():
            model = nn.Linear(4, 4)

        def step() -> None:
            if fd.get_replica_context().replica_id_in_sync_group == 0:
                raise KeyError("lost")
            model(torch.ones(1, 4)).sum().backward()

        if 0 in strategy.local_replica_ids:
            with pytest.raises(KeyError):
                strategy.run(step)
            os._exit(3)
        begin = time.monotonic()
        with pytest.raises(FastdistError) as caught:
            strategy.run(step)
        assert time.monotonic() - begin < 15
        assert 0 in caught.value.ranks, str(caught.value)

    with pytest.raises(RankError) as caught:
        run(case)
    assert caught.value.errors == {0: "exited with 3"}


def test_a_worker_that_raises_in_a_step_and_lives_on(run: Callable[[Any], Any]) -> None:
    """The others are told who has failed, and all go on together."""

    def case(strategy: Strategy) -> None:
        with strategy.scope():
            model = nn.Linear(4, 4)

        def step(fail: bool = False) -> None:
            if fail and fd.get_replica_context().replica_id_in_sync_group == 0:
                raise KeyError("lost")
            model(torch.ones(1, 4)).sum().backward()

        for _ in range(40):
            strategy.run(step)
        begin = time.monotonic()
        if 0 in strategy.local_replica_ids:
            with pytest.raises(KeyError):
                strategy.run(step, (True,))
        else:
            with pytest.raises(PeerFailureError, match="rank 0 has"):
                strategy.run(step, (True,))
        assert time.monotonic() - begin < 15
        model.zero_grad()
        strategy.run(step)
        assert (model.weight.grad == 1).all()
        strategy.check_in_sync()

    run(case)


def test_workers_that_all_raise_go_on(run: Callable[[Any], Any]) -> None:
    def case(strategy: Strategy) -> None:
        with strategy.scope():
            model = nn.Linear(4, 1, bias=False)

        def step(limit: float) -> None:
            model.zero_grad()
            (model(torch.ones(1, 4)) * (1 + replica_id())).sum().backward()
            if model.weight.grad.max() > limit:
                raise OverflowError

        def replica_id() -> int:
            return fd.get_replica_context().replica_id_in_sync_group

        mean = (strategy.num_replicas_in_sync + 1) / 2
        for _ in range(3):
            with pytest.raises(OverflowError):
                strategy.run(step, (0.0,))
            assert (model.weight.grad == mean).all()
            strategy.run(step, (100.0,))
        strategy.check_in_sync()

    run(case)


def test_models_that_differ(run: Callable[[Any], Any]) -> None:
    def case(strategy: Strategy) -> None:
        first = strategy.local_replica_ids[0] == 0

        def make() -> Any:
            with strategy.scope():
                return nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2 if first else 5))

        with pytest.raises(FastdistError, match=r"1.weight: shape \(2, 3\)(.|\n)*\(5, 3\)"):
            make()
        first = True
        model = make()
        strategy.check_in_sync()
        model[1] = nn.Linear(3, 2 if strategy.local_replica_ids[0] == 0 else 5)
        with pytest.raises(FastdistError, match=r"1.weight: shape \(2, 3\)(.|\n)*\(5, 3\)"):
            strategy.run(lambda: None)

    run(case)


def test_workers_that_run_different_collectives(run: Callable[[Any], Any]) -> None:
    def case(strategy: Strategy) -> None:
        first = strategy.local_replica_ids[0] == 0

        def step() -> None:
            context = fd.get_replica_context()
            if first:
                context.all_reduce("sum", torch.ones(2))
            else:
                context.all_gather(torch.ones(2))

        with pytest.raises(CollectiveMismatchError, match="all_reduce"):
            strategy.run(step)

    run(case)


def test_hyperparameters_that_differ(run: Callable[[Any], Any]) -> None:
    """Central storage has one optimizer, so nothing diverges."""

    def case(strategy: Strategy) -> None:
        with strategy.scope():
            model = nn.Linear(4, 1)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
            scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)

        def step() -> None:
            optimizer.zero_grad()
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
            own = fd.get_replica_context().replica_id_in_sync_group
            scheduler.step(1.0 if own == 1 else -float(scheduler.last_epoch))

        for _ in range(3):
            strategy.run(step)
        if isinstance(strategy, fd.CentralStorageStrategy):
            return
        with pytest.raises(
            FastdistError, match=r"SGD's lr is 0.5 on replica 0, 0.05 on replica 1"
        ) as caught:
            strategy.run(step)
        assert caught.value.ranks == (1,)
        optimizer.param_groups[0]["lr"] = 0.5
        with pytest.raises(FastdistError, match=r"drifted apart: weight\[\d\] is .* in run 1\."):
            strategy.run(lambda: model(torch.ones(1, 4)).sum().backward())  # by those steps
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        strategy.run(lambda: model(torch.ones(1, 4)).sum().backward())

    run(case)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["all_reduce", "backward", "assign"])
def test_a_collective_that_only_some_replicas_call(run: Callable[[Any], Any], what: str) -> None:
    """The replica that leaves it out calls another one next, which all are told of."""

    def case(strategy: Strategy) -> None:
        with strategy.scope():
            model = nn.Linear(2, 1)
            variable = fd.Variable(0.0, aggregation=fd.VariableAggregation.SUM)

        def step(everyone: bool) -> None:
            context = fd.get_replica_context()
            if not everyone and context.replica_id_in_sync_group == 1:
                return
            if what == "all_reduce":
                context.all_reduce("sum", torch.ones(2))
            elif what == "backward":
                model(torch.ones(1, 2)).sum().backward()
            else:
                variable.assign(1.0)

        strategy.run(step, (True,))
        begin = time.monotonic()

        def leave_out() -> None:
            strategy.run(step, (False,))
            if what == "backward":
                strategy.run(lambda: model(torch.ones(2, 2)).sum().backward())
            strategy.reduce("sum", 1.0)

        expected = (CollectiveMismatchError, PeerFailureError)
        if what == "backward":
            expected = FastdistError
        with pytest.raises(expected):
            leave_out()
        assert time.monotonic() - begin < 15
        strategy.run(step, (True,))
        strategy.check_in_sync()

    run(case)
