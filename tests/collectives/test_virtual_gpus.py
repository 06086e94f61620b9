"""The engine for GPUs on virtual GPUs: gpu_rank.py by threads and processes, with old NCCLs too.

Needs the package that the CMake preset `virtual_gpu` builds on PYTHONPATH; see `.ci/run`.
"""

import os
import subprocess
import sys
from pathlib import Path

import fastdist._core as _core
import gpu_collectives
import gpu_lifetimes
import pytest
from paths import TESTS

SUPPORT = TESTS / "collectives" / "support"

BUILT = Path(_core.__file__).with_name("libvirtual_cudart.so").exists()

pytestmark = pytest.mark.skipif(
    not BUILT, reason="the module was not built on virtual GPUs (CMake preset virtual_gpu)"
)

COLLECTIVES = [part.__name__ for part in gpu_collectives.PARTS]
LIFETIMES = [part.__name__ for part in (*gpu_lifetimes.PARTS, *gpu_lifetimes.VIRTUAL_PARTS)]


def run(command: list[str], gpus: int, settings: dict[str, str]) -> None:
    environ = os.environ | {"VIRTUAL_GPUS": str(gpus)} | settings
    result = subprocess.run(
        [sys.executable, *command], cwd=SUPPORT, capture_output=True, text=True, env=environ
    )
    assert result.returncode == 0, result.stdout + result.stderr


def as_threads(ranks: int, parts: list[str], **settings: str) -> None:
    run(["gpu_rank.py", *parts, "--threads", str(ranks)], ranks, settings)


def as_processes(ranks: int, gpus: int, parts: list[str], **settings: str) -> None:
    run(["-m", "fastdist", "run", "-n", str(ranks), "gpu_rank.py", *parts], gpus, settings)


def test_kernels() -> None:
    program = Path(_core.__file__).parents[1] / "test_gpu_kernels"
    done = subprocess.run([program], capture_output=True, text=True, timeout=120)
    assert "0 of 2 cases failed" in done.stdout, done.stdout + done.stderr
    assert "no GPU" not in done.stdout


@pytest.mark.parametrize("parts", [COLLECTIVES, LIFETIMES], ids=["collectives", "lifetimes"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_threads_with_a_gpu_each(ranks: int, parts: list[str]) -> None:
    as_threads(ranks, parts)


@pytest.mark.parametrize("parts", [COLLECTIVES, LIFETIMES], ids=["collectives", "lifetimes"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_processes_that_share_a_gpu(ranks: int, parts: list[str]) -> None:
    as_processes(ranks, 1, parts)


def test_processes_with_a_gpu_each() -> None:
    as_processes(3, 3, [*LIFETIMES, "moves"])


@pytest.mark.parametrize("version", ["22703", "22809"])
def test_older_libraries(version: str) -> None:
    """NCCL has no all_to_all, gather and scatter; ranks share a GPU as if on several hosts."""
    parts = ["moves", "uneven", *LIFETIMES]
    as_processes(2, 1, parts, VIRTUAL_NCCL_VERSION=version, VIRTUAL_NCCL_WINDOWS="0")


def test_windows_that_one_rank_does_not_get() -> None:
    as_threads(2, ["lists", "memory", "graphs"], VIRTUAL_NCCL_REFUSES="1")


def test_slow_streams() -> None:
    """Slow streams reveal work that does not wait for its inputs."""
    as_threads(2, ["lists", "grouped", *LIFETIMES], VIRTUAL_GPU_DELAY_US="2000")


# One rank, on the second GPU.
ALONE_ON_THE_SECOND = """
import ctypes
import virtual_arrays
import fastdist._core as _core
from fastdist.collectives.engines import nccl_library
nccl_library.load()
virtual_arrays.set_device(1)
x = virtual_arrays.array(__import__("numpy").ones(8, "float32"))
gpu = _core.NcclCommunicator.connect(_core.new_nccl_id(), 0, 1, 1, None, 20.0)
calls = gpu.calls(20.0)
stream = virtual_arrays.current_stream()
calls["all_reduce"](x, op="sum", stream=stream, async_op=True).wait(0)
gpu.close()
del calls, gpu
runtime = ctypes.CDLL(str(virtual_arrays.FOLDER / "libvirtual_cudart.so"))
print([runtime.virtual_gpu_has_context(device) for device in range(2)])
"""


# The same by a thread whose current device is the first GPU.
FROM_ANOTHER_DEVICE = """
import ctypes, threading
import numpy as np
import virtual_arrays
import fastdist
made = []
def make():
    virtual_arrays.set_device(1)
    made.extend(virtual_arrays.array(np.ones(n, "float32")) for n in (8, 9))
thread = threading.Thread(target=make)
thread.start()
thread.join()
comm = fastdist.init()
comm.all_reduce(made[0])
comm.all_reduce(made)
comm.all_reduce(made[0], async_op=True).synchronize()
assert virtual_arrays.current_device() == 0
comm.close()
runtime = ctypes.CDLL(str(virtual_arrays.FOLDER / "libvirtual_cudart.so"))
print([runtime.virtual_gpu_has_context(device) for device in range(2)])
"""


def test_no_memory_is_taken_of_other_gpus() -> None:
    for program in (ALONE_ON_THE_SECOND, FROM_ANOTHER_DEVICE):
        command = [sys.executable, "-c", program]
        result = subprocess.run(command, cwd=SUPPORT, capture_output=True, text=True, timeout=60)
        assert result.returncode == 0, result.stderr
        assert result.stdout == "[0, 1]\n"


# Two ranks as threads; argv: the device of the second rank.
CONNECT = """
import sys
import fastdist, virtual_arrays
from concurrent.futures import ThreadPoolExecutor
import fastdist._core as _core
from fastdist.collectives.engines import nccl_library
nccl_library.load()
unique_id = _core.new_nccl_id()
def connect(rank):
    device = rank * int(sys.argv[1])
    try:
        _core.NcclCommunicator.connect(unique_id, rank, 2, device, None, 20.0).close()
        return "connected"
    except fastdist.errors.FastdistError as error:
        return str(error)
with ThreadPoolExecutor(2) as pool:
    print(*pool.map(connect, range(2)), sep="\\n")
"""


@pytest.mark.parametrize("device", [0, 1])
def test_a_gpu_is_shared_by_settings_alone(device: int) -> None:
    command = [sys.executable, "-c", CONNECT, str(device)]
    result = subprocess.run(command, cwd=SUPPORT, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    if device == 1:
        assert lines == ["connected"] * 2
    else:
        assert len(lines) == 2
        assert any("Duplicate GPU detected" in line for line in lines)
