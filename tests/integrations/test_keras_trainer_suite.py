"""Keras' own tests of its trainer, in the scope of a strategy of one replica and of two."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("keras")
pytest.importorskip("jax")  # the tests import it

pytestmark = pytest.mark.slow

LIBRARIES = {
    r"_tf_dataset|^test_predict_preserve_order": ("tensorflow", "wants tensorflow"),
    r"_grain_": ("No module named 'grain'", "wants grain"),
}
# Of each strategy, regular expressions of the tests that fail, what the error says, and why.
# docs/keras.md says the same.
FAIL = {
    "one_device": LIBRARIES,
    "mirrored": LIBRARIES
    | {
        r"_jit$": ("UnsupportedError: .*jit_compile=True", "several replicas refuse compiled steps")
    },
}
SUITE = str(Path(__file__).with_name("keras_trainer_suite.py"))
COMMANDS = {
    "one_device": [SUITE, "one_device"],
    "mirrored": ["-m", "fastdist", "run", "-n", "2", SUITE, "mirrored"],
}


def run(strategy: str, folder: Path) -> list[dict[str, tuple[str, str]]]:
    """Run the tests; return each replica's kind of outcome and message of each test."""
    done = subprocess.run(
        [sys.executable, *COMMANDS[strategy], "--outcomes", str(folder)],
        env={name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return [json.loads(path.read_text()) for path in sorted(folder.iterdir())]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("strategy", "passed"), [("one_device", 92), ("mirrored", 80)])
def test_passes_keras_own_tests(strategy: str, passed: int, tmp_path: Path) -> None:
    for outcomes in run(strategy, tmp_path):
        kinds = [kind for kind, _ in outcomes.values()]
        unexpected = {
            name: message
            for name, (kind, message) in outcomes.items()
            if kind == "failed"
            and not any(
                re.search(pattern, name) and re.search(error, message)
                for pattern, (error, _) in FAIL[strategy].items()
            )
        }
        assert not unexpected, "\n".join(f"{name}: {said}" for name, said in unexpected.items())
        assert kinds.count("passed") >= passed
