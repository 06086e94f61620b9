"""`fastdist run --replace gloo`: programs that ask torch for Gloo, unchanged."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from fastdist._config import replaced_backend
from launched import Launcher, finish
from paths import ROOT

pytest.importorskip("torch")

PROGRAMS = ROOT / "tests" / "integrations" / "support" / "gloo_programs.py"
# What each program of another library needs.
NEEDED = {
    "accelerate": ("accelerate",),
    "transformers": ("transformers", "accelerate"),
    "transformers_ddp_backend": ("transformers", "accelerate"),
    "trl": ("trl",),
    "ignite": ("ignite",),
    "lightning": ("lightning",),
    "geometric": ("torch_geometric",),
    "timm": ("timm",),
    "sentence_transformers": ("sentence_transformers",),
    "optuna": ("optuna", "optuna_integration"),
}
# Every second one by torchrun: both take long, and differ only before the program begins.
STARTS = [(library, bool(n % 2)) for n, library in enumerate(NEEDED)]
DDP = """
import datetime, sys
import torch, torch.distributed as dist
from torch import nn

dist.init_process_group(*sys.argv[1:])
torch.manual_seed(dist.get_rank())
model = nn.parallel.DistributedDataParallel(nn.Linear(4, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(5):
    optimizer.zero_grad()
    model(torch.randn(8, 4)).square().sum().backward()
    optimizer.step()
total = torch.arange(3.0) + dist.get_rank()
dist.all_reduce(total, group=dist.new_group([0, 1]))
parts = [torch.zeros(3) for _ in range(2)]
for _ in range(200):
    work = dist.all_gather(parts, total, async_op=True)
    work.wait()
    assert work.get_future().done() and work.get_future().value()
if dist.get_backend() == "gloo":
    dist.monitored_barrier(timeout=datetime.timedelta(seconds=20))
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    assert dist.get_backend(alone) == "gloo" and alone.size() == 1
if dist.get_rank() == 0:
    numbers = [*model.module.weight.flatten().tolist(), *total.tolist()]
    print("RESULT", type(dist.group.WORLD).__name__, [x.hex() for x in numbers])
    print(dist.get_backend(), dist.get_backend_config())
dist.destroy_process_group()
"""


@pytest.fixture(autouse=True)
def installed() -> None:
    if not metadata.entry_points(group="torch.backends", name="fastdist"):
        pytest.skip("fastdist is not installed by pip, so torch cannot find it")


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "ddp.py"
    path.write_text(DDP)
    return path


def told(*words: object) -> list[str]:
    """Run a job of two ranks; return its lines."""
    done = finish(Launcher().start("-n", 2, "--no-prefix", *words))
    assert done.returncode == 0, done.stderr.decode()[-4000:]
    lines = done.stdout.decode().splitlines()
    return [line for line in lines if not line.startswith("[Gloo]")]  # torch 2.9 prints it


def told_by_torchrun(*words: object) -> list[str]:
    """Run a job of two ranks on fastdist, which an environment variable asks for."""
    command = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2")
    environ = os.environ | {"FASTDIST_REPLACE": "gloo", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, *map(str, words)], env=environ, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout.splitlines()


def told_by_gloo(library: str, attempts: int = 3) -> list[str]:
    """Run a job on Gloo itself, whose threads sometimes abort a process that ends."""
    try:
        return told(PROGRAMS, library)
    except AssertionError as error:
        if attempts == 1 or "terminate called without an active exception" not in str(error):
            raise
    return told_by_gloo(library, attempts - 1)


def result(lines: list[str]) -> tuple[str, str]:
    """Return the class of the process group and the numbers."""
    found = next(match for line in lines if (match := re.search(r"RESULT (\w+) (.*)", line)))
    return found[1], found[2]


@pytest.mark.slow
def test_gloo_by_name(program: Path) -> None:
    lines = told("--replace", "gloo", program, "gloo")
    assert result(lines)[0] == "ProcessGroupFastdist"
    assert lines[1] == "gloo cpu:gloo,cuda:gloo"


@pytest.mark.slow
@pytest.mark.parametrize("backend", [(), ("gloo",)])
def test_a_program_for_gloo_gets_fastdist(program: Path, backend: tuple[str, ...]) -> None:
    by_gloo = told(program, *backend)
    by_fastdist = told("--replace", "gloo", program, *backend)
    assert result(by_gloo)[0] == "ProcessGroup"
    assert result(by_fastdist) == ("ProcessGroupFastdist", result(by_gloo)[1])
    assert by_fastdist[1] == by_gloo[1]  # it has the names that it knows


@pytest.mark.slow
def test_programs_that_name_other_backends(program: Path) -> None:
    """NCCL is made when a tensor on a GPU needs it."""
    mixed = told("--replace", "gloo", program, "cpu:gloo,cuda:nccl")
    lines = told("--replace", "gloo", program, "fastdist")
    assert result(lines)[0] == "ProcessGroupFastdist"
    assert lines[1] == "fastdist cpu:fastdist,cuda:fastdist"
    assert result(mixed) == result(lines)
    assert mixed[1] == "cpu:gloo,cuda:nccl cpu:gloo,cuda:nccl"


@pytest.mark.slow
def test_torchrun_with_the_variable(program: Path) -> None:
    numbers = result(told(program, "gloo"))[1]
    assert result(told_by_torchrun(program, "gloo")) == ("ProcessGroupFastdist", numbers)


def test_what_cannot_be_replaced(program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = finish(Launcher().start("-n", 2, "--replace", "nccl", program))
    assert done.returncode == 2
    assert b"argument --replace: invalid choice: 'nccl'" in done.stderr
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    done = finish(Launcher().start("-n", 2, "--replace", "gloo", program))
    assert done.returncode == 2
    assert b"--replace needs torch to load fastdist, which TORCH_DEVICE_BACKEND_" in done.stderr
    with pytest.raises(ValueError, match="FASTDIST_REPLACE must be gloo, got 'nccl'"):
        replaced_backend({"FASTDIST_REPLACE": "nccl"})


@pytest.mark.slow
def test_remote_calls(tmp_path: Path) -> None:
    """torch.distributed.rpc makes a group of Gloo's own class, which stays Gloo's."""
    program = tmp_path / "calls.py"
    program.write_text(
        "import os, torch\n"
        "from torch.distributed import rpc\n"
        "rank = int(os.environ['RANK'])\n"
        "rpc.init_rpc(f'worker{rank}', rank=rank, world_size=2)\n"
        "if rank == 0:\n"
        "    print(rpc.rpc_sync('worker1', torch.add, args=(torch.ones(1), 2)).item())\n"
        "rpc.shutdown()\n"
    )
    assert told("--replace", "gloo", program) == told(program) == ["3.0"]


@pytest.mark.slow
def test_a_variable_that_names_another_backend() -> None:
    command = [sys.executable, "-c", "import torch"]
    environ = os.environ | {"FASTDIST_REPLACE": "nccl"}
    whole = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120)
    assert "ValueError: FASTDIST_REPLACE must be gloo, got 'nccl'" in whole.stderr


@pytest.mark.slow
def test_other_programs_do_not_import_fastdist() -> None:
    names = "'fastdist' not in sys.modules and 'fastdist_replace' in sys.modules"
    code = f"import sys, torch; assert {names}"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.xdist_group("test_ray")
def test_ray_train_gives_the_numbers_of_gloo() -> None:
    if importlib.util.find_spec("pandas") is None:  # of ray[train]
        pytest.skip("needs ray[train]")
    found = []
    for variables in ({}, {"FASTDIST_REPLACE": "gloo"}):
        done = subprocess.run(
            [sys.executable, str(PROGRAMS), "ray"],
            env=os.environ | variables,
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        found.append(result((done.stdout + done.stderr).splitlines()))
    assert [each[0] for each in found] == ["ProcessGroup", "ProcessGroupFastdist"]
    assert found[0][1] == found[1][1]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("library", "by_torchrun"), STARTS)
def test_a_library_gives_the_numbers_of_gloo(library: str, by_torchrun: bool) -> None:
    for module in NEEDED[library]:
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"needs {module}")
    by_gloo = result(told_by_gloo(library))
    assert by_gloo[0] == "ProcessGroup"
    if by_torchrun:
        lines = told_by_torchrun(PROGRAMS, library)
    else:
        lines = told("--replace", "gloo", PROGRAMS, library)
    assert result(lines) == ("ProcessGroupFastdist", by_gloo[1])
