"""Fixtures: worlds for the contract, and jobs of `fastdist run`."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

# One thread for each process: the tests run beside each other, with several processes each.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["KERAS_BACKEND"] = "torch"  # read when keras is imported
# Ray makes its workers nice, and they would hardly run beside the tests of other processes.
os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112
# Ranks on several machines make no file in the user's folder.
os.environ.setdefault("FASTDIST_SECRET", "the secret of the tests")

import fork_server
from launched import Launcher
from paths import TESTS

# Tests, and the ranks and replicas that they start, import from all folders of tests. What tests of
# several folders import is in tests/support.
_FOLDERS = [str(folder) for folder in sorted([*TESTS.glob("*/"), *TESTS.glob("*/support/")])]
sys.path[1:1] = _FOLDERS
os.environ["PYTHONPATH"] = os.pathsep.join(
    [*_FOLDERS, *filter(None, [os.environ.get("PYTHONPATH")])]
)

_LARGE_RUN = 500  # tests

with contextlib.suppress(ImportError):  # the tests of wheels do without
    from hypothesis import HealthCheck, settings

    settings.register_profile(
        "tests",
        database=None,
        deadline=None,
        derandomize=True,
        suppress_health_check=[HealthCheck.too_slow],
    )
    settings.load_profile("tests")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the choice of a part of the tests."""
    parser.addoption("--part", metavar="I/N", help="run the I-th of N equal parts of the tests")


def pytest_configure() -> None:
    """Undo the ignored signals of runs in the background; child processes would inherit them."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture
def insecure(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let connections over TCP carry bytes as they are, which a test writes by hand."""
    monkeypatch.setenv("FASTDIST_INSECURE", "1")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.hookimpl(tryfirst=True)  # before tests are deselected and before xdist reads the groups
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the tests of a class or file in one process; tests on two machines are slow.

    Groups with a long test come first, then large ones, so that none is left to one process at the
    end.
    """
    if config.option.part:
        part, parts = map(int, config.option.part.split("/"))
        items[:] = [item for item in items if zlib.crc32(item.nodeid.encode()) % parts == part - 1]
    longest: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for item in items:
        if "network" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.slow)
        if item.get_closest_marker("xdist_group") is None:
            made = getattr(item, "cls", None)
            name = item.path.stem if made is None else f"{item.path.stem}.{made.__name__}"
            item.add_marker(pytest.mark.xdist_group(name))
        limit = item.get_closest_marker("timeout")
        longest[_group(item)] = max(longest[_group(item)], limit.args[0] if limit else 180)
        sizes[_group(item)] += 1
    items.sort(key=lambda item: (-longest[_group(item)], -sizes[_group(item)]))


def _group(item: pytest.Item) -> str:
    mark = item.get_closest_marker("xdist_group")
    assert mark is not None
    return str(mark.args[0])


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run the contract of a class in the sizes that the class names.

    `worlds` and `doomed_worlds` are for the default run; `slow_worlds` and `slow_doomed_worlds`
    are marked slow.
    """
    for fixture, scope, prefix in (("ranks", "class", ""), ("doomed_ranks", "function", "doomed_")):
        if fixture in metafunc.fixturenames and hasattr(metafunc.cls, f"{prefix}worlds"):
            slow = getattr(metafunc.cls, f"slow_{prefix}worlds")
            sizes = [
                *getattr(metafunc.cls, f"{prefix}worlds"),
                *(pytest.param(size, marks=pytest.mark.slow) for size in slow),
            ]
            metafunc.parametrize(
                fixture, sizes, indirect=True, scope=scope, ids=lambda n: f"world{n}"
            )


def pytest_collection_finish(session: pytest.Session) -> None:
    """A large run needs the fork server, which can import its packages now."""
    if len(session.items) > _LARGE_RUN:
        fork_server.start()


@pytest.fixture(scope="class")
def ranks(request: pytest.FixtureRequest) -> Iterator[Any]:
    """A world that lives as long as its test class."""
    made = request.cls.ranks_class(request.param)
    yield made
    made.close()


@pytest.fixture
def doomed_ranks(request: pytest.FixtureRequest) -> Iterator[Any]:
    """A world of a single test."""
    made = request.cls.ranks_class(request.param)
    yield made
    made.close()


@pytest.fixture
def launcher() -> Iterator[Launcher]:
    launcher = Launcher()
    yield launcher
    assert launcher.kill() == []


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
