"""The compiled module's libraries, and a build with CUDA on a machine without a GPU."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import fastdist._core as _core
import pytest
from paths import ROOT

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


# How CMake decides about CUDA. A project without languages includes cmake/cuda.cmake.

OLD = "echo 'Cuda compilation tools, release 11.8, V11.8.89'"
# Says that it is new enough, and fails at everything else.
BROKEN = """
case "$*" in
  --version) echo 'Cuda compilation tools, release 13.0, V13.0.88' ;;
  *) echo 'nvcc fatal: no host compiler' >&2; exit 1 ;;
esac
"""
WITHOUT_VERSION = "echo 'cannot read nvcc.profile' >&2; exit 3"


def write_nvcc(tmp_path: Path, script: str) -> Path:
    """Writes a program that stands in for nvcc, which notes that it was called."""
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text(f"#!/bin/sh\ntouch '{tmp_path}/called'\n{script}\n")
    nvcc.chmod(0o755)
    return nvcc


def configure(
    tmp_path: Path, value: str, *, nvcc: Path | None = None, has_driver: bool = True
) -> subprocess.CompletedProcess[str]:
    """Runs CMake with one value of FASTDIST_CUDA, one CUDA compiler and perhaps a GPU driver."""
    cmake = shutil.which("cmake")
    if cmake is None:
        pytest.skip("needs cmake")
    version = subprocess.run(
        [cmake, "--version"], capture_output=True, text=True, check=True
    ).stdout
    if tuple(map(int, re.findall(r"\d+", version)[:2])) < (3, 26):
        pytest.skip("needs cmake 3.26 or newer on PATH")
    (tmp_path / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.26)\nproject(trial LANGUAGES NONE)\n"
        f'include("{ROOT}/cmake/cuda.cmake")\nmessage(STATUS "builds: ${{FASTDIST_BUILDS_CUDA}}")\n'
    )
    driver = tmp_path / "libcuda.so.1"
    driver.touch()
    options = [
        f"-DFASTDIST_CUDA={value}",
        f"-DFASTDIST_NVCC:STRING={nvcc or 'FALSE'}",
        f"-DFASTDIST_GPU_DRIVER:STRING={driver if has_driver else 'FALSE'}",
        "-DPython_EXECUTABLE=/bin/false",
    ]
    return subprocess.run(
        [cmake, "-Wno-unused-cli", "-S", tmp_path, "-B", tmp_path / "build", *options],
        capture_output=True,
        text=True,
        env={"PATH": "/usr/bin:/bin"},
    )


def words(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.parametrize("value", ["off", "OFF", "auto"])
def test_no_compiler_means_no_cuda(tmp_path: Path, value: str) -> None:
    result = configure(tmp_path, value)
    assert result.returncode == 0, result.stderr
    assert "builds: OFF" in result.stdout
    assert "Warning" not in result.stderr


def test_a_compiler_that_is_missing_is_named(tmp_path: Path) -> None:
    result = configure(tmp_path, "on")
    assert result.returncode != 0
    message = words(result.stderr)
    assert "no CUDA compiler was found" in message
    assert "pip install nvidia-cuda-nvcc==" in message


def test_other_settings_are_refused(tmp_path: Path) -> None:
    result = configure(tmp_path, "yes")
    assert result.returncode != 0
    assert 'must be auto, on or off, got "yes"' in words(result.stderr)


@pytest.mark.parametrize(("value", "has_driver"), [("auto", False), ("off", True)])
def test_the_compiler_is_not_called_without_a_driver_or_with_off(
    tmp_path: Path, value: str, has_driver: bool
) -> None:
    result = configure(tmp_path, value, nvcc=write_nvcc(tmp_path, BROKEN), has_driver=has_driver)
    assert result.returncode == 0, result.stderr
    assert "builds: OFF" in result.stdout
    assert ("this machine has no GPU driver" in result.stdout) is not has_driver
    assert "Warning" not in result.stderr
    assert not (tmp_path / "called").exists()


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (OLD, "CUDA 12.1 or newer is needed, got 11.8 (NVCC)"),
        (WITHOUT_VERSION, "NVCC --version failed (3): cannot read nvcc.profile"),
        (BROKEN, "NVCC failed to build a program (1): nvcc fatal: no host compiler"),
    ],
    ids=["old", "without version", "broken"],
)
@pytest.mark.parametrize("value", ["auto", "on"])
def test_a_compiler_that_cannot_be_used_is_a_warning_with_auto_and_an_error_with_on(
    tmp_path: Path, value: str, script: str, reason: str
) -> None:
    nvcc = write_nvcc(tmp_path, script)
    result = configure(tmp_path, value, nvcc=nvcc)
    assert reason.replace("NVCC", str(nvcc)) in words(result.stderr)
    if value == "auto":
        assert result.returncode == 0, result.stderr
        assert "CMake Warning" in result.stderr
        assert "The GPU engine is not built" in words(result.stderr)
        assert "builds: OFF" in result.stdout
    else:
        assert result.returncode != 0
        assert "CMake Error" in result.stderr


@pytest.mark.slow
@pytest.mark.parametrize("value", ["auto", "on"])
def test_a_compiler_that_works_is_used(tmp_path: Path, value: str) -> None:
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("needs nvcc")
    result = configure(tmp_path, value, nvcc=Path(nvcc))
    assert result.returncode == 0, result.stderr
    assert "builds: ON" in result.stdout
