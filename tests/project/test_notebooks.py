"""The notebooks of examples/notebooks run, and their checks hold."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from paths import ROOT

NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
@pytest.mark.filterwarnings("default")  # of Jupyter's libraries
def test_it_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    for needed in ("ipykernel", "torch", "torchmetrics", "sklearn", "cloudpickle"):
        pytest.importorskip(needed)
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    monkeypatch.delenv("PYTEST_CURRENT_TEST")  # strategies start no replicas in a test
    assert os.environ["OMP_NUM_THREADS"] == "1"
    notebook = nbformat.read(path, as_version=4)
    nbclient.NotebookClient(notebook, timeout=150, kernel_name="python3").execute()


def test_notebooks_have_no_outputs() -> None:
    for path in NOTEBOOKS:
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        assert [cell["outputs"] for cell in cells if cell.get("outputs")] == [], path.name
