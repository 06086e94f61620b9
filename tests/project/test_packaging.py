"""Tests of what is installed and published: the version, the types, the compiled module."""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import fastdist
import pytest
from paths import ROOT


@pytest.fixture
def installed() -> importlib.metadata.Distribution:
    """The distribution whose package the tests import."""
    try:
        found = importlib.metadata.distribution("fastdist-collectives")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("fastdist is not installed")
    if not Path(str(found.locate_file("fastdist/__init__.py"))).samefile(fastdist.__file__):
        pytest.skip("fastdist is imported from the source tree")
    return found


def test_the_version_stands_in_one_place() -> None:
    for name in ("pyproject.toml", "CITATION.cff", "CMakeLists.txt", "cmake/wheel/CMakeLists.txt"):
        text = (ROOT / name).read_text(encoding="utf-8")
        assert re.findall(r"(?im)^\s*(?:project\(.*)?\bversion\b\s*[:= ]\s*[\"']?\d.*", text) == []


def test_metadata_have_the_version(installed: importlib.metadata.Distribution) -> None:
    assert installed.version == fastdist.__version__


def test_types_are_installed_and_one_module(installed: importlib.metadata.Distribution) -> None:
    files = [str(path) for path in installed.files or ()]
    assert {"fastdist/py.typed", "fastdist/_core.pyi"} <= set(files)
    # Not what a developer has built into the source tree, for another Python perhaps.
    assert len([name for name in files if name.endswith(".so")]) == 1
    # Nothing else at the top, such as tests or docs.
    tops = {name.split("/")[0] for name in files if not name.startswith("..")}
    names = {top for top in tops if not top.endswith((".dist-info", ".libs"))}
    assert names == {"fastdist", "fastdist_replace"}


@pytest.mark.skipif(
    not sysconfig.get_config_var("Py_GIL_DISABLED"), reason="this Python always has the GIL"
)
def test_the_import_leaves_the_gil_off() -> None:
    program = "import fastdist, sys; fastdist.init(); assert not sys._is_gil_enabled()"
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True)


@pytest.mark.parametrize(
    ("torch", "why"),
    [
        ('__version__ = "2.8.0+cpu"', "2.9 or newer, got 2.8.0+cpu"),
        (
            'raise OSError("libcudart.so.13: cannot open shared object file")',
            "which is installed but does not load: libcudart.so.13",
        ),
        (
            'raise ImportError("libcublas.so.13: cannot open shared object file")',
            "which is installed but does not load: libcublas.so.13",
        ),
        ('raise ModuleNotFoundError("No module named torch", name="torch")', "pip install torch"),
    ],
)
def test_a_torch_that_cannot_be_used_is_named(torch: str, why: str, tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(torch)
    program = "import fastdist as fd\nfd.MirroredStrategy"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONPATH": f"{tmp_path}:{Path(fastdist.__file__).parents[1]}"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    last = done.stderr.splitlines()[-1]
    assert last.startswith("ImportError: fastdist.MirroredStrategy needs torch"), done.stderr
    assert why in last
