"""The example for TPUs, run on virtual devices as a user would."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from paths import ROOT
from virtual_devices import on_devices

pytestmark = on_devices


def run(*options: str) -> tuple[float, float, str]:
    """Return the loss of the last epoch, the accuracy and the output."""
    done = subprocess.run(
        [sys.executable, "examples/tpu.py", "--epochs", "5", *options],
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    loss = re.findall(r"epoch 5/5  loss ([\d.]+)", done.stdout)
    accuracy = re.findall(r"accuracy on held-out digits: ([\d.]+)", done.stdout)
    return float(loss[0]), float(accuracy[0]), done.stdout


def test_same_as_on_one_device(tmp_path: Path) -> None:
    own, other = tmp_path / "tpu.pt", tmp_path / "cpu.pt"
    loss, accuracy, printed = run("--save", str(own))
    same_loss, same_accuracy, _ = run("--strategy", "one_device", "--save", str(other))
    assert loss == pytest.approx(same_loss, abs=2e-4)
    assert accuracy == pytest.approx(same_accuracy, abs=0.003)
    assert "compiled 1 program for 60 steps" in printed
    weights = torch.load(other)
    for name, value in torch.load(own).items():
        torch.testing.assert_close(value, weights[name], rtol=0, atol=4e-5)
