"""Worlds for the contract: `ranks` lives as long as its test class, `doomed_ranks` for one test;
and jobs of `fastdist run`."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from launched import Launcher

WORLDS = [1, 2, 3, 4, 7]


def pytest_configure() -> None:
    """What is started in the background or by nohup ignores signals, and so would its children."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture(scope="class", params=WORLDS, ids=lambda n: f"world{n}")
def ranks(request: pytest.FixtureRequest) -> Iterator[Any]:
    made = request.cls.ranks_class(request.param)
    yield made
    made.close()


@pytest.fixture(params=[2, 3], ids=lambda n: f"world{n}")
def doomed_ranks(request: pytest.FixtureRequest) -> Iterator[Any]:
    made = request.cls.ranks_class(request.param)
    yield made
    made.close()


@pytest.fixture
def launcher() -> Iterator[Launcher]:
    launcher = Launcher()
    yield launcher
    left = launcher.left()
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert left == []


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], Path]:
    def write(text: str) -> Path:
        path = tmp_path / "script.py"
        path.write_text(text)
        return path

    return write


@pytest.fixture
def step(launcher: Launcher, tmp_path: Path) -> Path:
    folder = tmp_path / "step"
    folder.mkdir()
    launcher.environ["STEP"] = str(folder)
    return folder
