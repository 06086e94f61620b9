"""The examples for torch.distributed: frameworks' usual scripts, with the name of the backend."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys

import pytest
from paths import ROOT

pytest.importorskip("torch")
pytest.importorskip("sklearn")

EXAMPLES = ROOT / "examples" / "torch_backend"
# The library that an example needs, its options, and the loss that it must fall below.
CASES = {
    "ddp_digits": ("torch", ("--epochs", "3"), 0.4),
    "fsdp2_transformer": ("torch", ("--steps", "60"), 3.5),
    "lightning_trainer": ("lightning", ("--epochs", "3"), 0.4),
    "lightning_fabric": ("lightning", ("--epochs", "3"), 0.4),
    "accelerate_digits": ("accelerate", ("--epochs", "3"), 0.4),
    "transformers_trainer": ("transformers", ("--epochs", "2"), 0.6),
    "torchrec_dlrm": ("torchrec", ("--steps", "100"), 0.4),
    "ray_train": ("pandas", ("--epochs", "3"), 0.4),  # of ray[train]
}


def losses(name: str, backend: str, options: tuple[str, ...]) -> list[float]:
    """Run an example on two ranks; return the losses that it prints."""
    launcher = () if name == "ray_train" else ("-m", "torch.distributed.run", "--nproc-per-node=2")
    command = (sys.executable, *launcher, str(EXAMPLES / f"{name}.py"), "--backend", backend)
    # Ray's workers that start in advance lack the example's runtime environment and are not used.
    environ = os.environ | {"RAY_prestart_worker_first_driver": "0"}
    done = subprocess.run(
        [*command, *options], env=environ, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [float(text) for text in re.findall(r"\bloss (\d+\.\d+)", done.stdout)]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "name",
    # Not while tests/integrations/test_ray.py has a cluster.
    [
        pytest.param(name, marks=[pytest.mark.xdist_group("test_ray")] * (name == "ray_train"))
        for name in CASES
    ],
)
def test_an_example_trains(name: str) -> None:
    library, options, least = CASES[name]
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"needs {library}")
    found = losses(name, "fastdist", options)
    assert found
    assert found[-1] < least


def test_every_example_is_run() -> None:
    elsewhere = {"keras_ddp"}  # in test_keras_nightly.py
    assert {path.stem for path in EXAMPLES.glob("*.py")} == set(CASES) | elsewhere
