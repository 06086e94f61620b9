"""Strategies whose replicas are on GPUs: one process for each, and all GPUs of one process."""

import subprocess
import sys

import fastdist._core as _core
import pytest
from paths import TESTS

torch = pytest.importorskip("torch")

PARTS = [
    "trains_as_one_device",
    "trains_graphed",
    "unused_parameters_keep_no_gradient",
    "replicas_draw_apart",
    "averages_batch_norm",
    "recomputes_in_its_replica",
    "brings_batches_to_the_gpu",
]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(_core.why_no_cuda() != "", reason=_core.why_no_cuda()),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="this torch has no CUDA"),
]


def passes(command: list[str]) -> None:
    result = subprocess.run(
        [sys.executable, *command],
        cwd=TESTS / "strategies" / "support",
        capture_output=True,
        text=True,
        timeout=170,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "passed" in result.stdout


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_a_process_for_each_replica(replicas: int, part: str) -> None:
    passes(["-m", "fastdist", "run", "-n", str(replicas), "strategies_on_gpus.py", part])


@pytest.mark.multi_gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("part", [part for part in PARTS if part != "trains_graphed"])
def test_all_gpus_of_one_process(part: str) -> None:
    passes(["strategies_on_gpus.py", part])
