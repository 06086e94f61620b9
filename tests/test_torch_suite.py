"""Torch's own tests of c10d and DDP, passed by the backend "fastdist"."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("expecttest")

# Regular expressions of the tests that fastdist does not pass, and why. docs/torch_backend.md says
# the same.
EXCLUDED = {
    r"_(autograd|torch)_profiler$": "wants events to end in another thread, as Gloo's do",
    r"^test_ddp_logging_data_cpu$": "wants Gloo's name, which fastdist bears only in Python here",
}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("like", "only", "least"), [("gloo", "", 80), ("mpi", "all_to_all", 12)])
def test_passes_torchs_suite(like: str, only: str, least: int, tmp_path: Path) -> None:
    outcomes_file = tmp_path / "outcomes.json"
    command = [sys.executable, str(Path(__file__).with_name("torch_suite.py")), "fastdist"]
    arguments = ["--like", like, "--only", only, "--json", str(outcomes_file)]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True)
    assert outcomes_file.exists(), done.stderr[-4000:]
    outcomes = json.loads(outcomes_file.read_text())
    failed = [
        f"{name}: {outcome['message']}"
        for name, outcome in outcomes.items()
        if outcome["kind"] == "failed" and not any(re.search(e, name) for e in EXCLUDED)
    ]
    assert not failed, "\n".join(failed)
    passed = [name for name, outcome in outcomes.items() if outcome["kind"] == "passed"]
    assert len(passed) >= least
