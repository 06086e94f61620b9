"""Errors of TPUStrategy without a TPU or without torch_xla."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from virtual_devices import HAS_XLA


def said(code: str, **environ: str) -> str:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PJRT_", "CPU_NUM", "XLA_"))}
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=kept | environ,
    )
    return done.stdout + done.stderr


@pytest.mark.slow
def test_fastdist_does_not_load_torch_xla() -> None:
    code = "import sys, fastdist as fd; fd.TPUStrategy; print('torch_xla' in sys.modules)"
    assert said(code).strip() == "False"


@pytest.mark.skipif(HAS_XLA, reason="torch_xla is installed")
@pytest.mark.slow
def test_no_torch_xla() -> None:
    error = said("import fastdist as fd; fd.TPUStrategy()")
    assert "ImportError: TPUs need torch_xla: pip install torch==2.9.* torch_xla==2.9.*" in error
    assert "use fd.MirroredStrategy() instead" in error


@pytest.mark.xla
@pytest.mark.skipif(not HAS_XLA, reason="needs torch_xla")
@pytest.mark.parametrize(
    ("environ", "messages"),
    [
        ({"PJRT_DEVICE": "TPU"}, ["no TPU could be initialised: ", "found 'TPU'", "libtpu"]),
        ({}, ["no TPU could be initialised: PJRT fell back to the CPU", "found None"]),
    ],
)
def test_no_tpu(environ: dict[str, str], messages: list[str]) -> None:
    error = said("import fastdist as fd; fd.TPUStrategy()", **environ)
    for message in (*messages, "use fd.MirroredStrategy() instead", "CPU_NUM_DEVICES=4"):
        assert message in error
    assert "fastdist.errors.UnsupportedError" in error


@pytest.mark.xla
@pytest.mark.skipif(not HAS_XLA, reason="needs torch_xla")
def test_hosts_that_pjrt_does_not_find() -> None:
    code = (
        "import fastdist as fd; from fastdist.cluster import TPUClusterResolver\n"
        "fd.TPUStrategy(TPUClusterResolver(['a', 'b'], 0))"
    )
    error = said(code, PJRT_DEVICE="CPU", CPU_NUM_DEVICES="2")
    assert (
        "PJRT finds 2 CPU devices, 2 of them on this host; expected devices of 2 hosts, " in error
    )
    assert "worker_hostnames names. Start the program on every host" in error
