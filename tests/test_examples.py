"""Each example, run as a user would."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
torch = pytest.importorskip("torch")
pytest.importorskip("sklearn")


def run_digits(ranks: int, weights: Path) -> tuple[float, dict[str, Any]]:
    command = [sys.executable, "-m", "fastdist", "run", "--no-prefix", "-n", str(ranks)]
    command += [str(ROOT / "examples/digits_all_reduce.py"), "--epochs", "12", "--save"]
    done = subprocess.run(
        [*command, str(weights)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    found = re.search(r"accuracy on held-out digits: ([\d.]+)%", done.stdout)
    assert found is not None
    return float(found[1]), torch.load(weights)


def test_digits_all_reduce_gives_the_same_on_any_number_of_ranks(tmp_path: Path) -> None:
    alone_accuracy, alone = run_digits(1, tmp_path / "1.pt")
    assert alone_accuracy > 95
    for ranks in (2, 3):
        accuracy, weights = run_digits(ranks, tmp_path / f"{ranks}.pt")
        assert abs(accuracy - alone_accuracy) < 0.5
        for name, value in weights.items():
            torch.testing.assert_close(value, alone[name], rtol=0, atol=2e-3)


def run_mirrored(*command: str) -> tuple[str, float]:
    """The last epoch's loss and the accuracy that it prints."""
    done = subprocess.run(
        [sys.executable, *command, "--epochs", "20"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    loss = re.findall(r"epoch 20/20  loss ([\d.]+)", done.stdout)
    accuracy = re.findall(r"accuracy on held-out digits: ([\d.]+)", done.stdout)
    assert len(loss) == len(accuracy) == 1, done.stdout
    return loss[0], float(accuracy[0])


def test_mirrored_gives_the_same_on_every_strategy() -> None:
    script = "examples/mirrored.py"
    loss, accuracy = run_mirrored(script, "--strategy", "one_device")
    assert accuracy > 0.95
    run = ("-m", "fastdist", "run", "--no-prefix", "-n")
    for command in (
        (script, "--devices", "cpu:0", "cpu:1", "cpu:2"),
        (*run, "2", script),
        (*run, "3", script),
    ):
        same_loss, same_accuracy = run_mirrored(*command)
        assert float(same_loss) == pytest.approx(float(loss), abs=2e-4)
        assert same_accuracy == pytest.approx(accuracy, abs=0.003)
