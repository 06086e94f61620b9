"""`Communicator` on GPU arrays, on real GPUs or on virtual GPUs.

The CMake preset `virtual_gpu` builds the module for virtual GPUs; see `.ci/run`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from pathlib import Path

import fastdist._core as _core
import pytest
from gpu_parts import ALONE, LOSING, TOGETHER
from paths import TESTS

IS_VIRTUAL = Path(_core.__file__).with_name("libvirtual_cudart.so").exists()
LIMIT_S = 150

pytestmark = [
    *([] if IS_VIRTUAL else [pytest.mark.gpu]),
    pytest.mark.skipif(_core.why_no_cuda() != "", reason=_core.why_no_cuda()),
    pytest.mark.timeout(LIMIT_S + 20),
]


def start(arguments: list[str], gpus: int, **environ: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *arguments],
        cwd=TESTS / "collectives" / "support",
        env=os.environ | {"VIRTUAL_GPUS": str(gpus)} | environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def passes(process: subprocess.Popen[str]) -> None:
    out, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, out
    assert "passed" in out


def gpus_for(ranks: int) -> int:
    if not IS_VIRTUAL and len(_core.cuda_devices()) < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    return ranks


def by_processes(ranks: int, *parts: str, **environ: str) -> subprocess.Popen[str]:
    """Start ranks that share a GPU."""
    return start(
        ["-m", "fastdist", "run", "-n", str(ranks), "gpu_communicator.py", *parts], 1, **environ
    )


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_processes(ranks: int) -> None:
    passes(by_processes(ranks, *ALONE, *(TOGETHER if ranks > 1 else [])))


@pytest.mark.parametrize("ranks", [2, 4])
def test_threads_with_a_gpu_each(ranks: int) -> None:
    parts = [part for part in (*ALONE, *TOGETHER) if part != "shrinking"]  # which is for processes
    passes(start(["gpu_communicator.py", *parts, "--threads", str(ranks)], gpus_for(ranks)))


@pytest.mark.skipif(not IS_VIRTUAL, reason="reads the refusal of a whole job")
def test_calls_that_do_not_block_are_refused() -> None:
    process = by_processes(2, "every_op", NCCL_COMM_BLOCKING="0")
    out, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode != 0
    assert "UnsupportedError: fastdist needs NCCL's blocking communicators: unset NCCL_COMM" in out


@pytest.mark.skipif(not IS_VIRTUAL, reason="torch's tensors have it already")
def test_arrays_that_c_code_reads() -> None:
    passes(by_processes(2, *ALONE, *TOGETHER, VIRTUAL_ARRAYS="exchanged"))


def test_threads_with_the_same_gpu_are_refused() -> None:
    passes(start(["gpu_communicator.py", "one_gpu_twice", "--threads", "2"], 1))


def test_ranks_that_see_one_gpu_each_share_none(tmp_path: Path) -> None:
    """The settings that let ranks share a GPU, which slow NCCL down, are not set."""
    script = tmp_path / "rank.py"
    script.write_text("""
import os
os.environ["CUDA_VISIBLE_DEVICES"] = os.environ["LOCAL_RANK"]
import fastdist as fd
from gpu_communicator import every_op
every_op(fd.init())
assert not [name for name in os.environ if name.startswith("NCCL_")]
print("passed")
""")
    command = ["-m", "fastdist", "run", "-n", "2", str(script)]
    passes(start(command, gpus_for(2)))


@pytest.mark.parametrize("part", ["on_two_gpus", "out_of_memory"])
def test_gpus_of_their_own(part: str) -> None:
    passes(start(["gpu_communicator.py", part, "--threads", "2"], gpus_for(2)))


@pytest.mark.parametrize("part", LOSING)
@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_are_lost(ranks: int, part: str) -> None:
    """Ranks are lost; no launcher ends the other ranks."""
    job = {"FASTDIST_JOB": uuid.uuid4().hex, "WORLD_SIZE": str(ranks)}
    job["LOCAL_WORLD_SIZE"] = str(ranks)
    started = [
        start(["gpu_communicator.py", part], 1, **job, RANK=str(rank), LOCAL_RANK=str(rank))
        for rank in range(ranks)
    ]
    lost = ranks - 1 if part in ("a_killed_rank", "a_silent_peer") else None
    for rank, process in enumerate(started):
        if rank == lost:
            process.communicate(timeout=LIMIT_S)
        else:
            passes(process)


@pytest.mark.skipif(IS_VIRTUAL, reason="virtual GPUs survive a fork")
def test_calls_on_the_host_leave_gpus_to_children() -> None:
    script = """
import os, fastdist as fd, numpy as np, torch
fd.init().all_reduce(np.ones(3))
child = os.fork()
if child == 0:
    os._exit(0 if torch.ones(2, device="cuda").sum().item() == 2 else 1)
print("passed" if os.waitpid(child, 0)[1] == 0 else "the child had no GPU")
"""
    passes(start(["-c", script], 1))
