"""Fixtures that run a case of a strategy on 2 and on 3 replicas."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import cloudpickle
import pytest
from fastdist import Strategy
from ranks import ProcessRanks
from test_strategies import run_case

Run = Callable[..., list[Any]]


@pytest.fixture(scope="module", params=[2, pytest.param(3, marks=pytest.mark.slow)])
def ranks(request: pytest.FixtureRequest) -> Iterator[ProcessRanks]:
    ranks = ProcessRanks(request.param)
    yield ranks
    ranks.close()


@pytest.fixture
def run(ranks: ProcessRanks) -> Run:
    def run(case: Callable[[Strategy], Any], kind: str = "mirrored", **options: Any) -> list[Any]:
        return ranks.run(run_case, cloudpickle.dumps(case), kind, {"timeout_s": 20.0, **options})

    return run
