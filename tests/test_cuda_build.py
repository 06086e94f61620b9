"""What the compiled module links to, and how a build with CUDA behaves where there is no GPU."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import fastdist._core as _core
import pytest

ROOT = Path(__file__).resolve().parents[1]
MODULE = Path(_core.__file__)

# Found at run time (libnccl), by the runtime inside the module (libcuda), or not used at all.
NEVER_LINKED = re.compile(r"lib(cuda|cudart|nccl|torch|torch_\w+|c10|cupti|nv\w*)\.so")
GPU_SYMBOL = re.compile(r"^_*(cuda[A-Z]\w*|nccl[A-Z]\w*|cu[A-Z][A-Za-z0-9_]*|__cuda\w+)$")

with_cuda = pytest.mark.skipif(not _core.cuda_is_built(), reason="this build has no CUDA")
without_gpu = pytest.mark.skipif(_core.why_no_cuda() == "", reason="this machine has a GPU")


def readelf(*options: str) -> list[str]:
    if shutil.which("readelf") is None:
        pytest.skip("needs readelf")
    command = ["readelf", "--wide", *options, str(MODULE)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


def symbols() -> list[tuple[str, bool]]:
    """The dynamic symbols of the module, and whether each is defined in it."""
    rows = [line.split() for line in readelf("--dyn-syms")]
    return [
        (row[7].split("@")[0], row[6] != "UND")
        for row in rows
        if len(row) >= 8 and row[0].rstrip(":").isdigit()
    ]


def test_no_gpu_library_is_linked() -> None:
    needed = [line for line in readelf("--dynamic") if "(NEEDED)" in line]
    assert needed != []
    assert [line for line in needed if NEVER_LINKED.search(line)] == []


def test_no_gpu_symbol_is_left_to_other_libraries() -> None:
    assert [name for name, defined in symbols() if not defined and GPU_SYMBOL.match(name)] == []


def test_the_runtime_inside_stays_inside() -> None:
    """Torch's own CUDA runtime and this one must not be bound to each other."""
    assert [name for name, defined in symbols() if defined and GPU_SYMBOL.match(name)] == []


@pytest.mark.parametrize(
    ("name", "is_gpu"),
    [
        ("cudaMalloc", True),
        ("ncclAllReduce", True),
        ("cuInit", True),
        ("__cudaRegisterFatBinary", True),
        ("current_exception", False),
        ("PyErr_Occurred", False),
    ],
)
def test_symbols_of_gpu_libraries_are_known(name: str, is_gpu: bool) -> None:
    assert bool(GPU_SYMBOL.match(name)) is is_gpu


def test_facts_agree() -> None:
    assert (_core.cuda_runtime_version() > 0) is _core.cuda_is_built()
    assert bool(_core.cuda_devices()) is (_core.why_no_cuda() == "")


@pytest.mark.skipif(_core.cuda_is_built(), reason="this build has CUDA")
def test_a_build_without_cuda_says_how_to_get_it() -> None:
    assert "FASTDIST_CUDA=on" in _core.why_no_cuda()


@with_cuda
@without_gpu
@pytest.mark.skipif(_core.cuda_driver_version() != 0, reason="this machine has a driver")
def test_an_absent_driver_is_called_absent() -> None:
    assert "no CUDA driver" in _core.why_no_cuda()


@with_cuda
@without_gpu
def test_cpu_arrays_are_served_without_a_gpu() -> None:
    script = (
        "import fastdist, numpy as np\n"
        "x = np.arange(5.0)\n"
        "with fastdist.init() as comm: comm.all_reduce(x)\n"
        "a, b = fastdist.local_group(2)\n"
        "from concurrent.futures import ThreadPoolExecutor\n"
        "with ThreadPoolExecutor(2) as pool:\n"
        "    y = list(pool.map(lambda c: c.all_reduce(np.arange(5.0)), (a, b)))\n"
        "assert (x == np.arange(5.0)).all() and (y[1] == 2 * x).all()\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def configure(tmp_path: Path, value: str) -> subprocess.CompletedProcess[str]:
    """Let CMake decide about CUDA on a machine where no compiler for it is found."""
    if shutil.which("cmake") is None:
        pytest.skip("needs cmake")
    (tmp_path / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.20)\nproject(trial LANGUAGES NONE)\n"
        f'include("{ROOT}/cmake/cuda.cmake")\nmessage(STATUS "builds: ${{FASTDIST_BUILDS_CUDA}}")\n'
    )
    hidden = ["-DFASTDIST_NVCC=FALSE", "-DPython_EXECUTABLE=/bin/false"]
    command = ["cmake", "-S", tmp_path, "-B", tmp_path / "build", f"-DFASTDIST_CUDA={value}"]
    return subprocess.run(
        [*command, *hidden], capture_output=True, text=True, env={"PATH": "/usr/bin:/bin"}
    )


@pytest.mark.parametrize("value", ["off", "OFF", "auto"])
def test_no_compiler_means_no_cuda(tmp_path: Path, value: str) -> None:
    result = configure(tmp_path, value)
    assert result.returncode == 0, result.stderr
    assert "builds: OFF" in result.stdout


def test_a_compiler_that_is_missing_is_named(tmp_path: Path) -> None:
    result = configure(tmp_path, "on")
    assert result.returncode != 0
    message = " ".join(result.stderr.split())
    assert "no CUDA compiler was found" in message
    assert "pip install nvidia-cuda-nvcc==" in message


def test_other_settings_are_refused(tmp_path: Path) -> None:
    result = configure(tmp_path, "yes")
    assert result.returncode != 0
    assert 'must be auto, on or off, got "yes"' in " ".join(result.stderr.split())
