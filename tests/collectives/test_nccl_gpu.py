"""The engine for GPUs by its compiled interface: ranks share a GPU or have one each."""

import importlib.util
import subprocess
import sys

import fastdist._core as _core
import gpu_collectives
import gpu_lifetimes
import pytest
from paths import TESTS

PARTS = [part.__name__ for part in (*gpu_collectives.PARTS, *gpu_lifetimes.PARTS)]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(_core.why_no_cuda() != "", reason=_core.why_no_cuda()),
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch"),
]


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ranks_on_gpus(ranks: int, part: str) -> None:
    command = [sys.executable, "-m", "fastdist", "run", "-n", str(ranks), "gpu_rank.py", part]
    result = subprocess.run(
        command, cwd=TESTS / "collectives" / "support", capture_output=True, text=True, timeout=170
    )
    assert result.returncode == 0, result.stdout + result.stderr
