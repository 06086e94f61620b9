"""Worlds for the contract: `ranks` lives as long as its test class, `doomed_ranks` for one test."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

WORLDS = [1, 2, 3, 4, 7]


@pytest.fixture(scope="class", params=WORLDS, ids=lambda n: f"world{n}")
def ranks(request: pytest.FixtureRequest) -> Iterator[Any]:
    made = request.cls.ranks_class(request.param)
    yield made
    made.close()


@pytest.fixture(params=[2, 3], ids=lambda n: f"world{n}")
def doomed_ranks(request: pytest.FixtureRequest) -> Iterator[Any]:
    made = request.cls.ranks_class(request.param)
    yield made
    made.close()
