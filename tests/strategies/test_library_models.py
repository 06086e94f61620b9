"""Models of torchvision, timm and transformers train on two replicas as on one device."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest
from library_models import MODELS
from paths import TESTS


@pytest.mark.slow
@pytest.mark.parametrize("name", list(MODELS))
def test_a_model_trains_as_on_one_device(name: str) -> None:
    library = name.split()[0]
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"needs {library}")
    command = [sys.executable, str(TESTS / "strategies" / "support" / "library_models.py"), name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=170, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("equal ")  # transformers prints, too
