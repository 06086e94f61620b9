"""The backend "fastdist" of torch.distributed, beside Gloo in the same processes."""

import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from ranks import ProcessRanks  # noqa: E402
from torch_cases import LIKE_GLOO, MORE_THAN_GLOO, SLOW, run_case  # noqa: E402


@pytest.fixture(scope="module", params=[2, pytest.param(3, marks=pytest.mark.slow)])
def ranks(request: pytest.FixtureRequest) -> Iterator[ProcessRanks]:
    ranks = ProcessRanks(request.param)
    yield ranks
    ranks.close()


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in LIKE_GLOO],
)
def test_gives_what_gloo_gives(ranks: ProcessRanks, name: str, tmp_path: Path) -> None:
    outcomes: dict[str, Any] = {}
    for backend in ("gloo", "fastdist"):
        outcomes[backend] = ranks.run(run_case, name, backend, str(tmp_path / backend))
    assert outcomes["fastdist"] == outcomes["gloo"]


IMPORTS = {
    "fastdist first": "import fastdist, sys; assert 'torch' not in sys.modules; import torch",
    "torch first": "import torch.distributed; import fastdist",
    "both twice": "import fastdist, torch, importlib; importlib.reload(fastdist)",
    "by the entry point alone": (
        "import torch.distributed, importlib.metadata as m;"
        "[point] = m.entry_points(group='torch.distributed.backends', name='fastdist');"
        "point.load()(None)"
    ),
}


@pytest.mark.parametrize(
    "order",
    [
        pytest.param(order, marks=[pytest.mark.slow] * (order != "fastdist first"))
        for order in IMPORTS
    ],
)
def test_is_registered_in_any_order_of_imports(order: str, tmp_path: Path) -> None:
    if "entry point" in order and not entry_points(group="torch.distributed.backends"):
        pytest.skip("fastdist is not installed")
    code = f"""
import warnings
{IMPORTS[order]}
import torch, torch.distributed as dist
dist.init_process_group("fastdist", init_method="file://{tmp_path}/store", rank=0, world_size=1)
x = torch.ones(2)
dist.all_reduce(x)
assert dist.get_backend() == "fastdist" and x.tolist() == [1, 1]
dist.destroy_process_group()
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("name", MORE_THAN_GLOO)
def test_does_what_gloo_refuses(ranks: ProcessRanks, name: str, tmp_path: Path) -> None:
    ranks.run(run_case, name, "fastdist", str(tmp_path / "store"))
