"""The backend "fastdist" of torch.distributed, beside Gloo in the same processes."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from ranks import ProcessRanks  # noqa: E402
from torch_cases import LIKE_GLOO, MORE_THAN_GLOO, run_case  # noqa: E402


@pytest.fixture(scope="module", params=[2, 3])
def ranks(request: pytest.FixtureRequest) -> Iterator[ProcessRanks]:
    ranks = ProcessRanks(request.param)
    yield ranks
    ranks.close()


@pytest.mark.parametrize("name", LIKE_GLOO)
def test_gives_what_gloo_gives(ranks: ProcessRanks, name: str, tmp_path: Path) -> None:
    outcomes: dict[str, Any] = {}
    for backend in ("gloo", "fastdist"):
        outcomes[backend] = ranks.run(run_case, name, backend, str(tmp_path / backend))
    assert outcomes["fastdist"] == outcomes["gloo"]


@pytest.mark.parametrize("name", MORE_THAN_GLOO)
def test_does_what_gloo_refuses(ranks: ProcessRanks, name: str, tmp_path: Path) -> None:
    ranks.run(run_case, name, "fastdist", str(tmp_path / "store"))
