"""A strategy over all virtual devices."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
from fastdist import TPUStrategy
from virtual_devices import N


@pytest.fixture
def strategy() -> Iterator[TPUStrategy]:
    made = TPUStrategy()
    assert made.num_replicas_in_sync == N
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "run of .* was compiled again", UserWarning)
        yield made
