"""Keras of a nightly build: its own data parallelism on fastdist, and `fit` under strategies."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
from paths import ROOT

pytest.importorskip("keras")
pytest.importorskip("sklearn")

# KERAS_NIGHTLY: a folder, as of `pip install --no-deps --target FOLDER keras-nightly`.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif("KERAS_NIGHTLY" not in os.environ, reason="KERAS_NIGHTLY names no folder"),
]


def run(*arguments: str) -> str:
    """Run Python with this Keras; return what it prints."""
    path = [os.environ["KERAS_NIGHTLY"], *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(path)},
        capture_output=True,
        text=True,
        timeout=170,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


def test_keras_own_data_parallelism() -> None:
    example = ("examples/torch_backend/keras_ddp.py", "--epochs", "3")
    printed = run("-m", "fastdist", "run", "-n", "2", *example)
    losses = re.findall(r"\bloss (\d+\.\d+)", printed)
    assert len(losses) == 3
    assert float(losses[-1]) < 0.4


def test_fit_under_strategies() -> None:
    files = ("tests/integrations/test_keras.py", "tests/integrations/test_keras_fit.py")
    some = "classification or own_train_step or reduced_once"
    run("-m", "pytest", "-n", "0", "-m", "not slow", "-p", "no:cacheprovider", *files, "-k", some)
