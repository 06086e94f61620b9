"""`fastdist doctor`: what it shows, in text and JSON, and when it says that something is wrong."""

import argparse
import importlib.metadata
import json
import os
import platform
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import fastdist
import pytest
from fastdist.cli import doctor
from fastdist.cli.command import run_command
from fastdist.cli.doctor import report
from fastdist.cli.doctor.report import Fact, format_bytes, is_well, to_json
from fastdist.processes import cgroups

TITLES = ["fastdist", "machine", "memory", "libraries", "launcher", "engines", "check"]
DOCTOR = [sys.executable, "-m", "fastdist", "doctor"]


def run_doctor(*options: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **variables}
    return subprocess.run(
        [*DOCTOR, *options], env=environment, capture_output=True, text=True, timeout=60
    )


def fact(section: list[Fact], key: str) -> Fact:
    return next(fact for fact in section if fact.key == key)


def test_text_has_every_section_and_aligned_values() -> None:
    result = run_doctor()
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert [line for line in lines if not line.startswith(" ")][: len(TITLES)] == TITLES
    version = next(line for line in lines if line.startswith("  version "))
    kernel = next(line for line in lines if line.startswith("  kernel "))
    assert version.index(fastdist.__version__) == kernel.index(platform.release())


def test_json_has_the_same_sections_and_the_facts_that_programs_need() -> None:
    result = run_doctor("--json")
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    assert set(TITLES) < set(report)
    assert report["fastdist"]["version"] == fastdist.__version__
    assert report["machine"]["cores"] == len(os.sched_getaffinity(0))
    assert report["engines"]["host"] == "available"
    assert report["check"]["all_reduce"] is True
    assert report["well"] is True


def test_imports_none_of_the_libraries_that_it_reports() -> None:
    script = (
        "import sys; from fastdist.cli.main import main; main(['doctor']);"
        "heavy = {'torch', 'ml_dtypes', 'cupy', 'mpi4py', 'matplotlib', 'rich'} & set(sys.modules);"
        "sys.exit(str(heavy) if heavy else 0)"
    )
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, timeout=60)


def test_each_rank_names_its_launcher() -> None:
    launch = [sys.executable, "-m", "fastdist", "run", "-n", "2", *DOCTOR]
    result = subprocess.run(launch, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert "fastdist run" in result.stdout
    assert "1 of 2 on this machine" in result.stdout


def test_senseless_launcher_variables_are_shown_and_fail() -> None:
    result = run_doctor(RANK="4", WORLD_SIZE="2")
    assert result.returncode == 1
    assert "RANK='4'" in result.stdout


CGROUPS: list[tuple[str, dict[str, str], float | None, int | None]] = [
    ("0::/\n", {}, None, None),
    ("0::/\n", {"cpu.max": "max 100000", "memory.max": "max"}, None, None),
    ("0::/\n", {"cpu.max": "150000 100000", "memory.max": "1048576"}, 1.5, 1 << 20),
    # A parent's lower limit counts.
    (
        "0::/job/step\n",
        {
            "job/step/cpu.max": "400000 100000",
            "job/cpu.max": "50000 100000",
            "job/memory.max": "4096",
            "job/step/memory.max": "max",
        },
        0.5,
        4096,
    ),
    # Version 1, one mount per controller; a path of the host's that is not mounted here.
    (
        "4:memory:/docker/1\n3:cpu,cpuacct:/docker/1\n",
        {
            "cpu,cpuacct/cpu.cfs_quota_us": "200000",
            "cpu,cpuacct/cpu.cfs_period_us": "50000",
            "memory/memory.limit_in_bytes": "8192",
        },
        4.0,
        8192,
    ),
    (
        "4:memory:/\n3:cpu:/\n0::/\n",
        {
            "cpu/cpu.cfs_quota_us": "-1",
            "cpu/cpu.cfs_period_us": "100000",
            "memory/memory.limit_in_bytes": "9223372036854771712",
            "unified/cgroup.procs": "",
        },
        None,
        None,
    ),
]


@pytest.mark.parametrize(("memberships", "files", "cpus", "memory"), CGROUPS)
def test_cgroup_limits(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    memberships: str,
    files: dict[str, str],
    cpus: float | None,
    memory: int | None,
) -> None:
    mount = tmp_path / "cgroup"
    mount.mkdir()
    for name, text in files.items():
        (mount / name).parent.mkdir(parents=True, exist_ok=True)
        (mount / name).write_text(text + "\n")
    (tmp_path / "memberships").write_text(memberships)
    monkeypatch.setattr(cgroups, "_MEMBERSHIPS", tmp_path / "memberships")
    monkeypatch.setattr(cgroups, "_MOUNT", mount)
    assert cgroups.cpu_limit() == cpus
    assert cgroups.memory_limit_bytes() == memory
    assert fact(report.machine_section(), "cpu_quota").value == cpus
    assert fact(report.memory_section(), "cgroup_limit").value == memory


def test_address_space_limit_that_is_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1 << 20, 1 << 20))
    section = report.memory_section()
    assert fact(section, "address_space_limit").is_bad
    assert "ulimit -v" in fact(section, "address_space_limit").text
    assert not is_well({"": section})


def test_missing_libraries_come_with_their_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    def only_numpy(name: str) -> str:
        if name == "numpy":
            return "2.0"
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", only_numpy)
    section = report.libraries_section()
    assert fact(section, "numpy").text == "2.0"
    assert fact(section, "torch").value is None
    for name in ("torch", "cryptography", "matplotlib"):
        assert fact(section, name).text.endswith(f": pip install {name}")
    assert fact(section, "torch_xla").text == "not installed"  # needs an environment of its own


def test_wrong_result_or_error_fails_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong(fastdist.Communicator):
        def all_reduce(self, array: Any, *_: Any, **__: Any) -> Any:
            return 0 * array

    def wrong_group(size: int, *, timeout: float) -> list[Wrong]:
        return [Wrong(c.engine, timeout) for c in fastdist.local_group(size, timeout=timeout)]

    monkeypatch.setattr(report, "local_group", wrong_group)
    section = report.check_section()
    assert not is_well({"": section})
    assert "expected [3.0, 30.0] on each rank, got [[0.0, 0.0], [0.0, 0.0]]" in section[0].text


def test_exit_code_and_text_of_bad_facts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = {"one": [Fact("a_b", 1, "fails", is_bad=True)], "empty": []}
    monkeypatch.setattr("fastdist.cli.doctor.report.examine", lambda: found)
    parser = argparse.ArgumentParser()
    doctor.add_parser(parser.add_subparsers())
    options = parser.parse_args(["doctor"])
    assert run_command(options) == 1
    assert capsys.readouterr().out == "one\n  a b  fails\n"
    assert json.loads(to_json(found)) == {"one": {"a_b": 1}, "empty": {}, "well": False}


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1 << 20, "1 MiB"), (25276510208, "23.54 GiB")],
)
def test_format_bytes(size_bytes: int, text: str) -> None:
    assert format_bytes(size_bytes) == text
