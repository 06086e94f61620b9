"""The command for one GPU, run without one, and the pages that are made of its results."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from paths import ROOT

pytest.importorskip("torch")
FOLDER = ROOT / "benchmarks" / "gpu"


def one_gpu(out: Path, *arguments: str) -> tuple[subprocess.CompletedProcess[str], Any]:
    command = [sys.executable, str(FOLDER / "one_gpu.py"), "--dry", "--out", str(out), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150)
    return done, json.loads(out.read_text()) if out.exists() else None


@pytest.mark.slow
def test_parts_run_without_a_gpu_and_not_again(tmp_path: Path) -> None:
    name, other = "messages before peers are connected", "packing"
    done, results = one_gpu(tmp_path / "out.json", name, other)
    assert done.returncode == 0, done.stdout + done.stderr
    assert results["parts"][name]["passed"]
    assert results["parts"][name]["figures"][0]["part"] == name.replace(" ", "_")
    assert results["parts"][other]["skipped"] == "needs a GPU"
    done, again = one_gpu(tmp_path / "out.json", name)
    assert done.returncode == 0
    assert again["parts"][name]["s"] == results["parts"][name]["s"]
    assert name not in done.stdout


def test_an_unknown_part_is_refused(tmp_path: Path) -> None:
    done, results = one_gpu(tmp_path / "out.json", "no such part")
    assert (done.returncode, results) == (2, None)
    assert "unknown parts ['no such part']; expected some of ['engine, 1 ranks'" in done.stderr


def test_pages_have_the_newest_results() -> None:
    command = [sys.executable, str(FOLDER / "results.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
