"""`fastdist bench` as a user runs it."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fastdist.cli.bench.cases import COLLECTIVES, Case, array_cases
from fastdist.cli.bench.peers import (
    MPI_NAMES,
    Engine,
    fastdist_engine,
    find_peers,
)
from fastdist.cli.bench.results import Row
from fastdist.cli.bench.session import Effort, EngineError, Session
from fastdist.cli.main import main
from launched import wait_until
from marks import slow

has_torch = importlib.util.find_spec("torch") is not None
has_matplotlib = importlib.util.find_spec("matplotlib") is not None


def run_bench(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "fastdist", "bench", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        **options,
    )


def rank_processes(folder: Path) -> list[str]:
    """Command lines of ranks whose bench has its temporary files in this folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if "fastdist.cli.bench.worker" in command and str(folder) in command:
            found.append(command)
    return found


@pytest.mark.slow
def test_a_run_writes_its_table_and_goes_on_without_a_missing_peer(tmp_path: Path) -> None:
    peers = "gloo,mpich" if has_torch else "mpich"
    plot = ["--plot", str(tmp_path / "plot.png")] if has_matplotlib else []
    files = ["--json", str(tmp_path / "a.json"), *plot]
    done = run_bench(
        *("all_reduce", "--sizes", "8,64K", "--ranks", "2", "--iters", "4"),
        *("--vs", peers),
        *files,
        env={
            **os.environ,
            "PATH": "/usr/bin:/bin",
            "TMPDIR": str(tmp_path),
            "XDG_CACHE_HOME": str(tmp_path),
        },
    )
    assert done.returncode == 0, done.stderr
    loaded = json.loads((tmp_path / "a.json").read_text())
    if "mpich" in loaded["missing"]:  # else this environment has one of its own
        assert "# mpich is not installed: pip install --ignore-installed" in done.stdout
    assert [row["bytes"] for row in loaded["rows"]] == [8, 65536]
    assert [row["wrong"] for row in loaded["rows"]] == [0, 0]
    assert all(row["iterations"] >= 4 and row["p50_us"] > 0 for row in loaded["rows"])
    assert loaded["copy_gb_per_s"] > 0
    for name in files[1::2]:
        assert f"# wrote {name}\n" in done.stdout
    assert "# warning: too few calls: fewer than 20 at all of them" in done.stdout
    if plot:
        assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    if has_torch:
        assert loaded["rows"][0]["peers"]["gloo"]["wrong"] == 0
    assert rank_processes(tmp_path) == []


def test_json_on_stdout_leaves_the_table_to_stderr() -> None:
    done = run_bench("barrier", "--ranks", "2", "--iters", "2", "--json", "-")
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout)["rows"]
    assert (row["bytes"], row["wrong"]) == (0, 0)
    assert "p50" in done.stderr
    assert "wrote" not in done.stderr


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    effort = Effort(iterations=2, warmup=1, rounds=1)
    with Session([fastdist_engine(3)], 3, effort) as session:
        yield session


def measured(session: Session, cases: Sequence[Case]) -> list[Row]:
    rows = [session.measure(case) for case in cases]
    assert all(row.ours.iterations == 2 and row.ours.p50_us > 0 for row in rows)
    return rows


@pytest.mark.parametrize("name", list(COLLECTIVES))
def test_every_collective_is_measured_and_right(session: Session, name: str) -> None:
    rows = measured(session, array_cases(name, (8, 4096, 300_000), 3))
    assert [row.ours.wrong for row in rows] == [0] * len(rows)


@pytest.mark.slow
@pytest.mark.skipif(not has_torch, reason="torch is not installed")
def test_every_collective_is_measured_through_torch() -> None:
    effort = Effort(iterations=2, warmup=0, rounds=1, timeout_s=60)
    with Session([fastdist_engine(2, through_torch=True)], 2, effort) as session:
        for name in COLLECTIVES:
            rows = measured(session, array_cases(name, (8, 4096), 2, array="torch"))
            assert [row.ours.wrong for row in rows] == [0] * len(rows), name


@pytest.mark.parametrize(
    ("array", "dtype", "redop"),
    [
        ("empty", "float32", "sum"),
        ("numpy", "int32", "max"),
        ("numpy", "float16", "mean"),
        ("numpy", "uint8", "prod"),
        pytest.param("torch", "float64", "min", marks=pytest.mark.slow),
        pytest.param("torch", "bfloat16", "mean", marks=pytest.mark.slow),
    ],
)
def test_arrays_dtypes_and_reduce_ops(session: Session, array: str, dtype: str, redop: str) -> None:
    if array == "torch" and not has_torch:
        pytest.skip("torch is not installed")
    for name in ("all_reduce", "reduce_scatter"):
        rows = measured(
            session, array_cases(name, (8, 100_000), 3, dtype=dtype, redop=redop, array=array)
        )
        assert [row.ours.wrong for row in rows] == [0, 0]


@pytest.mark.parametrize("beside_gloo", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_list_is_one_case(beside_gloo: bool) -> None:
    if beside_gloo and not has_torch:
        pytest.skip("torch is not installed")
    peers = ("--vs", "gloo") if beside_gloo else ()
    options = ("--dtype", "int8", "--ranks", "2", "--iters", "1", "--json", "-")
    done = run_bench("all_reduce", "--list", "resnet50", *options, *peers)
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout)["rows"]
    assert (row["model"], row["count"], row["wrong"]) == ("resnet50", 25_557_032, 0)
    assert {name: peer["wrong"] for name, peer in row["peers"].items()} == (
        {"gloo": 0} if beside_gloo else {}
    )


@pytest.mark.parametrize("name", MPI_NAMES)
def test_an_installed_mpi_is_measured_side_by_side(name: str) -> None:
    if find_peers([name], 2)[1]:
        pytest.skip(f"{name} is not installed")
    options = ("--ranks", "2", "--iters", "2", "--vs", name)
    done = run_bench("all_to_all", "--sizes", "8,4K", *options, "--json", "-")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["rows"]
    assert [row["peers"][name]["wrong"] for row in rows] == [0, 0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("all_reduce", "--sizes", "8Q"), "got '8Q'"),
        (("all_reduce", "--vs", "nccl"), "got 'nccl'"),
        (("all_reduce", "--ranks", "0"), "ranks from 1 to 999999, got '0'"),
        (("all_reduce", "--iters", "0"), "calls from 1 to 999999, got '0'"),
        (("all_reduce", "--time-s", "nan"), "expected a number of seconds, got 'nan'"),
        (("all_reduce", "--dtype", "bfloat16"), "--array torch"),
        (("all_reduce", "--dtype", "int32", "--op", "mean"), "floating point"),
        (("send_recv", "--ranks", "1"), "at least 2"),
        (("all_reduce", "--json", "/no/such/folder/a.json"), "/no/such/folder"),
        (("all_reduce", "--plot", "plot.gif9"), "--plot"),
        (("all_reduce", "--sizes", "8", "--plot", "plot.png"), "several sizes, got one"),
        (("barrier", "--plot", "plot.png"), "several sizes, got one"),
        (("broadcast", "--list", "gpt2"), "--list is for all_reduce"),
        (("all_reduce", "--through", "torch", "--array", "numpy"), "--through torch is for torch"),
    ],
)
def test_options_that_make_no_sense_are_refused_by_name(
    capfd: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    with pytest.raises(SystemExit) as caught:  # argparse exits by itself
        sys.exit(main(["bench", *arguments]))
    assert caught.value.code == 2
    assert message in capfd.readouterr().err


def test_a_failed_engine_is_named_with_what_it_printed() -> None:
    broken = Engine("broken", "mpi", (sys.executable, "-c", "raise SystemExit('no network')"))
    first, second = r"broken failed to start: no network\n", r".*status 1 before all 2 ranks .*\n"
    expected = pytest.raises(EngineError, match=f"^{first}{second}no network$")
    with expected, Session([broken], 2, Effort()):
        pass


def test_an_engine_that_cannot_start_is_named_with_the_rank_and_its_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    lost = replace(fastdist_engine(2), name="lost", driver="no_such")
    first = r"lost failed to start: KeyError: 'no_such'\n"
    expected = pytest.raises(EngineError, match=rf"^{first}rank [01] raised:\nTraceback")
    with expected, Session([lost], 2, Effort()):
        pass
    assert rank_processes(tmp_path) == []


def test_an_engine_whose_program_is_absent_is_named() -> None:
    absent = Engine("absent", "mpi", ("/no/such/mpiexec",))
    says = "absent failed to start: cannot run /no/such/mpiexec: No such file or directory"
    with pytest.raises(EngineError, match=f"^{says}$"), Session([absent], 2, Effort()):
        pass


@pytest.mark.slow
def test_a_peer_that_fails_to_start_is_named_and_left_out(tmp_path: Path) -> None:
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    prefix = tmp_path / "fastdist" / "peers" / "mpich"
    (prefix / "lib" / version / "site-packages" / "mpi4py").mkdir(parents=True)
    mpiexec = prefix / "bin" / "mpiexec"
    mpiexec.parent.mkdir()
    mpiexec.write_text("#!/bin/sh\necho -----\necho no hosts here >&2\nexit 3\n")
    mpiexec.chmod(0o755)
    done = run_bench(
        *("all_reduce", "--sizes", "8,64K", "--ranks", "2", "--iters", "4", "--vs", "mpich"),
        *("--json", str(tmp_path / "a.json")),
        env={**os.environ, "XDG_CACHE_HOME": str(tmp_path)},
    )
    assert done.returncode == 1
    assert "# mpich failed to start: no hosts here\n" in done.stdout
    assert done.stderr == (
        "fastdist bench: mpich failed to start: no hosts here\n"
        f"{mpiexec} ended with status 3 before all 2 ranks had started:\n-----\nno hosts here\n"
    )
    loaded = json.loads((tmp_path / "a.json").read_text())
    assert loaded["failed"] == {"mpich": "no hosts here"}
    assert [row["peers"] for row in loaded["rows"]] == [{}, {}]
    assert [row["wrong"] for row in loaded["rows"]] == [0, 0]


@pytest.mark.parametrize("number", [signal.SIGINT, *slow(signal.SIGKILL)])
def test_a_bench_that_is_ended_leaves_no_processes(tmp_path: Path, number: signal.Signals) -> None:
    command = [sys.executable, "-m", "fastdist", "bench", "all_reduce", "--ranks", "2"]
    bench = subprocess.Popen(
        [*command, "--sizes", "1M", "--time-s", "60"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    deadline = time.monotonic() + 60
    while not rank_processes(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.5)
    bench.send_signal(number)
    _, errors = bench.communicate(timeout=30)
    if number == signal.SIGINT:
        assert bench.returncode == 130
        assert "interrupted" in errors
        assert rank_processes(tmp_path) == []
    wait_until(lambda: rank_processes(tmp_path) == [])
