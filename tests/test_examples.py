"""Each example, run as a user would."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
torch = pytest.importorskip("torch")
pytest.importorskip("sklearn")


ENV = os.environ | {"OMP_NUM_DEVICES": "1"}  # replicas share few cores


def run_digits(ranks: int, weights: Path) -> tuple[float, dict[str, Any]]:
    command = [sys.executable, "-m", "fastdist", "run", "--no-prefix", "-n", str(ranks)]
    command += [str(ROOT / "examples/digits_all_reduce.py"), "--epochs", "12", "--save"]
    done = subprocess.run(
        [*command, str(weights)], capture_output=True, text=True, timeout=120, check=False, env=ENV
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


def run_example(*command: str) -> tuple[float, float, str]:
    """The last epoch's loss, the accuracy, and all that it prints."""
    done = subprocess.run(
        [sys.executable, *command, "--epochs", "10"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=ROOT,
        env=ENV,
    )
    assert done.returncode == 0, done.stderr
    return *numbers(done.stdout), done.stdout


def numbers(text: str) -> tuple[float, float]:
    loss = re.findall(r"epoch 10/10  loss ([\d.]+)  [\d,]+ examples/s", text)
    accuracy = re.findall(r"accuracy on held-out digits: ([\d.]+)", text)
    assert len(loss) == len(accuracy) == 1, text
    return float(loss[0]), float(accuracy[0])


RUN = ("-m", "fastdist", "run", "--no-prefix", "-n")
DEVICES = ("--devices", "cpu:0", "cpu:1", "cpu:2")


@pytest.mark.parametrize(
    ("script", "others"),
    [
        ("mirrored", [(*RUN, "2"), (*RUN, "3"), DEVICES]),
        ("central_storage", [DEVICES, ("--strategy", "mirrored", *DEVICES)]),
        ("custom_loop", [(*RUN, "3"), DEVICES, ("--strategy", "central_storage", *DEVICES)]),
    ],
)
def test_same_on_every_strategy(script: str, others: list[tuple[str, ...]]) -> None:
    path = f"examples/{script}.py"
    loss, accuracy, _ = run_example(path, "--strategy", "one_device")
    assert accuracy > 0.92
    for options in others:
        command = (*options, path) if options[0] == "-m" else (path, *options)
        same_loss, same_accuracy, _ = run_example(*command)
        assert same_loss == pytest.approx(loss, abs=2e-4)
        assert same_accuracy == pytest.approx(accuracy, abs=0.003)


def test_central_storage_keeps_one_copy() -> None:
    for strategy, kept in (("central_storage", 1), ("mirrored", 3)):
        printed = run_example("examples/central_storage.py", "--strategy", strategy, *DEVICES)[2]
        assert f"the optimizer's state is kept by {kept} of 3 replicas" in printed


def test_multi_worker_by_tf_config(tmp_path: Path) -> None:
    script, path = "examples/multi_worker.py", tmp_path / "weights.pt"
    loss, accuracy, _ = run_example(script, "--strategy", "one_device", "--save", str(path))
    assert accuracy > 0.92
    weights = torch.load(path)
    by_launcher, _, printed = run_example(*RUN, "2", script, "--save", str(path))
    assert by_launcher == pytest.approx(loss, abs=2e-4)
    assert "examples seen in training: 14370" in printed
    for name, value in torch.load(path).items():
        torch.testing.assert_close(value, weights[name], rtol=0, atol=2e-3)

    addresses = [f"127.0.0.1:{port}" for port in (29871, 29872)]
    started = []
    for index in range(2):
        task = {"type": "worker", "index": index}
        config = json.dumps({"cluster": {"worker": addresses}, "task": task})
        started.append(
            subprocess.Popen(
                [sys.executable, script, "--epochs", "10", "--devices", "cpu:0", "cpu:1"],
                stdout=subprocess.PIPE,
                text=True,
                cwd=ROOT,
                env=ENV | {"TF_CONFIG": config},
            )
        )
    outputs = [process.communicate(timeout=120)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0]
    assert outputs[1] == ""  # only the chief speaks
    same_loss, same_accuracy = numbers(outputs[0])
    assert same_loss == pytest.approx(loss, abs=2e-4)
    assert same_accuracy == pytest.approx(accuracy, abs=0.003)
    assert "4 replicas" in outputs[0]


def test_word_vectors_in_all_modes() -> None:
    pytest.importorskip("zmq")
    pytest.importorskip("cloudpickle")
    script = ["examples/word2vec_ps.py", "--words", "150000", "--steps", "200", "--dim", "32"]
    servers = ["-m", "fastdist", "run", "--no-prefix", "--workers", "2", "--ps", "1"]
    losses = {}
    for mode in ("single", "async", "sync"):
        command = [*script, "--mode", mode]
        done = subprocess.run(
            [sys.executable, *(command if mode == "single" else servers + command)],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
            cwd=ROOT,
            env=ENV,
        )
        assert done.returncode == 0, done.stderr
        found = re.findall(r"held-out loss (before|after): ([\d.]+)", done.stdout)
        assert [when for when, _ in found] == ["before", "after"], done.stdout
        assert float(found[0][1]) == pytest.approx(4.1589, abs=1e-4)  # 6 ln 2: it knows nothing
        losses[mode] = float(found[1][1])
        assert re.search(r"^ +self: \w+ 0\.\d\d  ", done.stdout, re.MULTILINE)
    assert losses["single"] < 3.5
    for mode in ("async", "sync"):
        assert losses[mode] == pytest.approx(losses["single"], rel=0.03)
