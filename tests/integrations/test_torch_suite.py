"""Torch's own tests of c10d and DDP, passed by the backend "fastdist"."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("expecttest")

# Regular expressions of the tests that fastdist does not pass, and why. docs/torch_backend.md says
# the same.
EXCLUDED = {
    r"_(autograd|torch)_profiler$": "wants events to end in another thread, as Gloo's do",
    r"^test_monitored_barrier_gloo": "torch refuses it to every backend but Gloo",
    r"^test_ddp_logging_data_cpu$": "wants Gloo's name, which fastdist bears only in Python here",
}


def run_suite(folder: Path, like: str, only: str) -> tuple[dict[str, dict[str, Any]], str]:
    """Return the outcome of each test, and what was printed to stderr that is not a log."""
    outcomes_file = folder / "outcomes.json"
    command = [sys.executable, str(Path(__file__).with_name("torch_suite.py")), "fastdist"]
    arguments = ["--like", like, "--only", only, "--json", str(outcomes_file)]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True)
    assert outcomes_file.exists(), done.stderr[-4000:]
    said = [line for line in done.stderr.splitlines() if not re.match(r"[IW]\d{4} |USDT:", line)]
    return json.loads(outcomes_file.read_text()), "\n".join(said[-100:])


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("like", "only", "least"), [("gloo", "", 80), ("mpi", "all_to_all", 12)])
def test_passes_torchs_suite(like: str, only: str, least: int, tmp_path: Path) -> None:
    outcomes, said = run_suite(tmp_path, like, only)
    failed = {
        name: outcome["message"]
        for name, outcome in outcomes.items()
        if outcome["kind"] == "failed" and not any(re.search(e, name) for e in EXCLUDED)
    }
    assert not failed, f"{failed}\n{said}"
    passed = [name for name, outcome in outcomes.items() if outcome["kind"] == "passed"]
    assert len(passed) >= least


# Tests of torch's repository that fastdist does not pass. docs/torch_backend.md says why.
EXCLUDED_OF_REPOSITORY = {
    r"test_distribute_tensor_rank$": "counts operators that are not called",
    r"test_parallelize_module_src_data_rank$": "counts operators that are not called",
    r"^test_device_mesh.*(CuTeLayoutTest|test_flatten_mesh_3d)": "of another release of torch",
    r"test_dcp_logger$": "Gloo fails it too",
}


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.skipif("TORCH_SOURCE" not in os.environ, reason="TORCH_SOURCE names no folder")
def test_passes_tests_of_torchs_repository(tmp_path: Path) -> None:
    """TORCH_SOURCE: torch's sources of a version near the installed one's."""
    from torch_repository import FILES, run_file

    failed = []
    passed = 0
    for file in FILES:
        path = Path(os.environ["TORCH_SOURCE"]) / "test" / "distributed" / file
        for name, outcome in run_file("fastdist", path).items():
            title = f"{file}::{name}"
            passed += outcome["kind"] == "passed"
            is_excluded = any(re.search(e, title) for e in EXCLUDED_OF_REPOSITORY)
            if outcome["kind"] == "failed" and not is_excluded:
                failed.append(f"{title}: {outcome['message']}")
    assert not failed, "\n".join(failed)
    assert passed > 600
